"""The time of whole training steps on CPU ranks, to which the rates of single operations are fitted.

Operations that are timed alone find their data in the cache, and their core free of everything else. In a
step they take longer, and ranks wait for each other, most of all beside other programs. So a few steps of the
default model are timed, and the compute rates are scaled until the predicted step takes as long.
"""

import time
from collections.abc import Iterator

import torch

from fullshard.distributed.agreement import rank, world_size
from fullshard.jobs.calibrate.device import max_over_ranks
from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware, Link, Rates, curve_with_slowdown
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

_ROWS = 8  # sequences of a rank's microbatch
_LEAST_STEPS, _MOST_STEPS = 3, 100
_MOST_WAITING = 0.2  # a choice; idle CPU ranks wait for 5 to 15 % of a step


def measure_step_seconds(*, seconds: float) -> float:
    """Times steps of `reference_plan` for about `seconds`, and returns the mean seconds of one. Collective.

    They contain what other programs on the machine take from the ranks.
    """
    plan = reference_plan(world_size())
    model, config = build_model(plan.run), plan.run.model
    assert isinstance(config, DecoderConfig), "the default model is one"
    own = torch.Generator().manual_seed(rank())
    tokens = torch.randint(config.vocabulary, (_ROWS, plan.run.data.sequence_length), generator=own)
    shard(model, plan)
    batch = {"tokens": tokens, "labels": tokens}
    state = TrainState(model, build_optimizer(model, plan), data=[batch] * _MOST_STEPS)
    return max_over_ranks(
        _mean_step_seconds(train(state, plan, loss=choose_loss(plan.run, model)), seconds=seconds)
    )


def _mean_step_seconds(steps: Iterator[object], *, seconds: float) -> float:
    """Runs steps for about `seconds`, and returns their mean duration. Collective."""
    next(steps)  # allocates, and chooses kernels
    max_over_ranks(0.0)  # a barrier
    started, taken, count = time.perf_counter(), 0.0, 0
    for count, _ in enumerate(steps, start=1):
        taken = time.perf_counter() - started
        if count >= _LEAST_STEPS and max_over_ranks(taken) > seconds:
            break
    return taken / count


def reference_plan(ranks: int) -> Plan:
    batch = [f"train.microbatch={_ROWS}", f"train.global_batch={_ROWS * ranks}", f"train.steps={_MOST_STEPS}"]
    return Plan.from_run(_reference_run().with_overrides(batch), world_size=ranks, device="cpu")


def _reference_run() -> Run:
    """Returns the default run on the CPU, in fp32 and without recompute."""
    return Run.load(overrides=["precision.mode=fp32", "recompute.mode=none", "run.device=cpu"])


def fit_rates_to_step(hardware: Hardware, step_seconds: float) -> Hardware:
    """Returns `hardware` with rates at which a step of `reference_plan` takes `step_seconds`.

    Collectives that are timed alone beside other programs wait for a core each time, more often than in a
    step. Links are therefore made faster if all waiting would exceed a fraction of the step.
    """
    plan, spec = reference_plan(hardware.world_size), describe_run(_reference_run(), "cpu")
    terms = StepTimePredictor(spec, hardware).predict_time(plan)
    waiting = terms.exposed_all_gather + terms.exposed_reduce_scatter + terms.exposed_all_reduce
    faster = min(1.0, _MOST_WAITING * step_seconds / waiting) if waiting else 1.0
    slower = (step_seconds - faster * waiting) / (terms.total - waiting)
    links = {name: link for name, link in (("within", hardware.within), ("across", hardware.across)) if link}
    fitted: dict[str, object] = {name: _link_with_slowdown(link, faster) for name, link in links.items()}
    return hardware.model_copy(update=fitted | {"rates": _rates_with_slowdown(hardware.rates, slower)})


def _rates_with_slowdown(rates: Rates, factor: float) -> Rates:
    slower: dict[str, object] = {"launch_seconds": factor * rates.launch_seconds}
    for name in ("memory", "optimizer"):
        slower[name] = curve_with_slowdown(getattr(rates, name), factor)
    for name in ("matmul", "attention", "attention_backward"):
        curves = getattr(rates, name).items()
        slower[name] = {dtype: curve_with_slowdown(curve, factor) for dtype, curve in curves}
    return rates.model_copy(update=slower)


def _link_with_slowdown(link: Link, factor: float) -> Link:
    slower = {
        name: rate.model_copy(
            update={
                "base_seconds": factor * rate.base_seconds,
                "hop_seconds": factor * rate.hop_seconds,
                "bytes_per_second": rate.bytes_per_second / factor,
                "curve": rate.curve and curve_with_slowdown(rate.curve, factor),
            }
        )
        for name, rate in link.known_rates.items()
    }
    return link.model_copy(update=slower)
