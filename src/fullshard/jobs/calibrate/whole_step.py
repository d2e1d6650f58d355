"""The time of whole training steps on CPU ranks, to which the rates of single operations are fitted.

Operations that are timed alone find their data in the cache, and their core free of everything else. In a
step they take longer, and ranks wait for each other, most of all beside other programs. So a few steps of the
default model are timed. The compute rates are scaled until the predicted compute time equals that of a rank
alone. Then the link rates are scaled until the predicted step equals that of all ranks.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fullshard.distributed.agreement import rank, world_size
from fullshard.jobs.calibrate.device import max_over_ranks, mean_over_ranks
from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss, loss_sum_and_count
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware, Link, Rates, curve_with_slowdown
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import TimeTerms
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

_ROWS = 8  # sequences of a rank's microbatch
_LEAST_STEPS, _MOST_STEPS = 3, 100
_LEAST_FACTOR = 0.05


class MeasuredSteps(NamedTuple):
    """Mean seconds of a step of the default model.

    alone: forward and backward of a rank by itself, without collectives; the mean over ranks
    together: a whole step of all ranks, sharded as `reference_plan`
    """

    alone: float
    together: float


def measure_whole_steps(*, seconds: float) -> MeasuredSteps:
    """Measures for about `seconds`, and returns the mean seconds of a step. Collective.

    They contain what other programs on the machine take from the ranks.
    """
    plan = reference_plan(world_size())
    model, config = build_model(plan.run), plan.run.model
    assert isinstance(config, DecoderConfig), "the default model is one"
    own = torch.Generator().manual_seed(rank())
    tokens = torch.randint(config.vocabulary, (_ROWS, plan.run.data.sequence_length), generator=own)
    batch, loss = {"tokens": tokens, "labels": tokens}, choose_loss(plan.run, model)

    def iterate_own_steps() -> Iterator[object]:
        unsharded = materialize(build_model(plan.run), seed=plan.run.run.seed)
        for _ in range(_MOST_STEPS):
            unsharded.zero_grad()
            yield loss_sum_and_count(loss(unsharded, batch))[0].backward()

    alone = mean_over_ranks(_mean_step_seconds(iterate_own_steps(), seconds=seconds / 3))
    shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=[batch] * _MOST_STEPS)
    together = _mean_step_seconds(train(state, plan, loss=loss), seconds=2 * seconds / 3)
    return MeasuredSteps(alone, max_over_ranks(together))


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
    """Returns the plan of the steps that `measure_whole_steps` times."""
    batch = [f"train.microbatch={_ROWS}", f"train.global_batch={_ROWS * ranks}", f"train.steps={_MOST_STEPS}"]
    return Plan.from_run(_reference_run().with_overrides(batch), world_size=ranks, device="cpu")


def _reference_run() -> Run:
    """Returns the default run on the CPU, in fp32 and without recompute."""
    return Run.load(overrides=["precision.mode=fp32", "recompute.mode=none", "run.device=cpu"])


def fit_rates_to_steps(hardware: Hardware, measured: MeasuredSteps) -> Hardware:
    """Returns `hardware` with rates at which the reference plan's step takes the measured seconds."""
    plan, spec = reference_plan(hardware.world_size), describe_run(_reference_run(), "cpu")

    def predict(known: Hardware) -> TimeTerms:
        return StepTimePredictor(spec, known).predict_time(plan)

    rates = _rates_with_slowdown(hardware.rates, measured.alone / predict(hardware).compute)
    fitted = hardware.model_copy(update={"rates": rates})
    terms = predict(fitted)
    collectives = terms.exposed_all_gather + terms.exposed_reduce_scatter + terms.exposed_all_reduce
    if not collectives:
        return fitted
    factor = max(1 + (measured.together - terms.total) / collectives, _LEAST_FACTOR)
    links = {name: link for name, link in (("within", fitted.within), ("across", fitted.across)) if link}
    return fitted.model_copy(update={name: _link_with_slowdown(link, factor) for name, link in links.items()})


def _rates_with_slowdown(rates: Rates, factor: float) -> Rates:
    slower: dict[str, object] = {
        "memory": curve_with_slowdown(rates.memory, factor),
        "launch_seconds": factor * rates.launch_seconds,
    }
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
