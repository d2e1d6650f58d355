"""Explanation of a search's result: what limits the plan, and which change gains most."""

from collections.abc import Iterator
from typing import Literal, cast

from fullshard.errors import PlanError
from fullshard.planner.search.candidates import require_prediction, run_with_settings
from fullshard.planner.search.search import SearchResult, iterate_runs_with_setting_unpinned, search
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Run, Tier
from fullshard.spec.value import FrozenModel

# Fraction of the step from which a difference is reported: it would be noticeable.
NOTABLE = 0.03
Binding = Literal["memory", "links", "host", "computing"]
_LIMITS: dict[Binding, str] = {
    "memory": "memory is the limit",
    "links": "the links are the limit",
    "host": "the host is the limit",
    "computing": "computing is the limit",
}


class PlanImprovement(FrozenModel):
    """A change of the run or of the machine, and what it gains."""

    change: str
    plan: Plan | None = None  # the best plan after the change; None if the gain is in memory alone
    gain: float  # extra tokens/s per rank, as a fraction; or the fraction of memory that it saves
    text: str


class PlanExplanation(FrozenModel):
    """Explanation of the best plan.

    `binds` is the plan's limit, the first of these that is true:

    links       waiting for collectives takes more of the step than computing
    host        the host, or copies by FSDP2 or an offload target, takes more of it than computing
    memory      the fastest plan in twice as much is notably faster
    computing   otherwise: the kernels themselves; the longest notable wait is named beside it
    """

    binds: Binding
    because: str  # reason for `binds`, as text
    lever: PlanImprovement | None  # the change that gains most, if any is notable

    def limit_and_lever_lines(self) -> tuple[str, ...]:
        """Returns what binds, and the largest lever, a sentence or two each."""
        lever = [f"largest lever: {self.lever.text}"] if self.lever is not None else []
        return f"{_LIMITS[self.binds]}: {self.because}", *lever


def explain_plan(found: SearchResult, hardware: Hardware, *, spec: ModelSpec, run: Run) -> PlanExplanation:
    """Returns the explanation of `found`, the result of a search of `run`."""
    plan = found.best
    assert plan is not None, "a plan that fits is explained"
    binds, because = _binding_limit_and_reason(plan, found)
    lever = find_best_change(plan, hardware, spec=spec, run=run)
    return PlanExplanation(binds=binds, because=because, lever=lever)


def _binding_limit_and_reason(plan: Plan, found: SearchResult) -> tuple[Binding, str]:
    prediction = require_prediction(plan)
    time = prediction.time
    computing = (time.compute + time.recompute) / time.total
    longest = max(_notable_waits(prediction), key=lambda one: one[0], default=None)
    if longest is not None and longest[0] > computing:
        return longest[1:]
    if reason := _reason_of_memory_limit(plan, found.fastest_in_twice or plan):
        return "memory", reason
    repeated = f"{100 * time.recompute / time.total:.0f} % of it to recompute activations"
    again = f", {repeated}" if time.recompute else ""
    waits = f"; {longest[2]}" if longest is not None else ""
    return "computing", f"the model's kernels take {100 * computing:.0f} % of the step{again}{waits}"


def _reason_of_memory_limit(plan: Plan, fastest: Plan) -> str | None:
    """Returns how much faster `fastest`, of the plans in twice the memory, is; None if not notably."""
    prediction, other = require_prediction(plan), require_prediction(fastest)
    lacks = other.required_device_bytes - other.capacity_bytes
    speedup = other.tokens_per_second / prediction.tokens_per_second - 1
    if lacks <= 0 or speedup < NOTABLE:
        return None
    more = f"{format_bytes(lacks)} more than the {format_bytes(prediction.capacity_bytes)}"
    change = f"{format_difference(fastest, plan)}, {100 * speedup:.0f} % faster"
    return f"with {more} per rank: {change}"


def _notable_waits(prediction: Prediction) -> Iterator[tuple[float, Binding, str]]:
    """Yields (fraction of the step, limit, reason) of each notable part that is not computing."""
    total, time = prediction.time.total, prediction.time
    if time.offload > NOTABLE * total:
        tier = prediction.offload
        cause = tier.step_bottleneck if tier is not None else "copies of activations"
        percent = 100 * time.offload / total
        text = f"{percent:.0f} % of the step is waiting for the host and its drive: {cause}"
        yield time.offload / total, "host", text
    waits = {
        "all-gather": time.exposed_all_gather,
        "reduce-scatter": time.exposed_reduce_scatter,
        "all-reduce": time.exposed_all_reduce,
        "contention with collectives": time.contention,
        "ranks that share matmuls or sequences": time.model_parallel,
    }
    share = sum(waits.values()) / total
    if share > NOTABLE:
        name, longest = max(waits.items(), key=lambda one: one[1])
        most = f"most of it {name} ({format_seconds(longest)})"
        yield share, "links", f"{100 * share:.0f} % of the step waits for links, {most}"
    if time.engine > NOTABLE * total:
        share = time.engine / total
        yield share, "host", f"FSDP2's own copies and hooks are {100 * share:.0f} % of the step"


def format_difference(plan: Plan, chosen: Plan) -> str:
    """Returns the settings of `plan` in which it differs from `chosen`, as text."""
    texts = zip(_iterate_setting_texts(plan), _iterate_setting_texts(chosen), strict=True)
    return ", ".join(own for own, other in texts if own != other) or "the same settings"


def _iterate_setting_texts(plan: Plan) -> Iterator[str]:
    run = plan.run
    over = "" if plan.shard_degree == 1 else f" over {plan.shard_degree:,}"
    yield f"{plan.strategy}{over}"
    yield f"microbatch {plan.microbatch}"
    yield f"gradients reduced {'in each microbatch' if plan.sync_each_microbatch else 'once a step'}"
    yield f"recompute {run.recompute.mode_text}"
    yield "compiled" if run.run.compile is True else "not compiled"
    yield f"offload {run.offload.tier}"
    yield f"tensor parallel {plan.tensor_parallel}"


def find_best_change(plan: Plan, hardware: Hardware, *, spec: ModelSpec, run: Run) -> PlanImprovement | None:
    """Returns the change that gains most tokens/s per rank over `plan`, if it is notable.

    Tried are: a pinned microbatch, recompute or sharding left to the planner, compiled blocks, a batch twice
    as large, and with it twice as many GPUs. A loss that takes much memory is named if nothing gains more.
    """
    best = _chunked_loss_improvement(plan)
    own = require_prediction(plan).tokens_per_second / plan.world_size
    tiers = (cast("Tier", plan.run.offload.tier),)
    for change, other, machine in _iterate_changes(plan, hardware, run=run):
        try:
            found = search(spec, machine, other, tiers=tiers).best
        except PlanError:
            continue  # impossible on these ranks, or not traced
        if found is None:
            continue
        rate = require_prediction(found).tokens_per_second / found.world_size
        gain = rate / own - 1
        if gain >= NOTABLE and (best is None or gain > best.gain):
            text = f"{change} ({format_difference(found, plan)}): {100 * gain:.0f} % more tokens/s per rank"
            best = PlanImprovement(change=change, plan=found, gain=gain, text=text)
    return best


def _chunked_loss_improvement(plan: Plan) -> PlanImprovement | None:
    """Returns the lever of a loss in chunks; None if it has them, or logits take little of the memory."""
    prediction = require_prediction(plan)
    logits, needed = prediction.memory.loss, prediction.required_device_bytes
    tight = needed > prediction.capacity_bytes / 2
    if plan.run.train.loss_chunk != 0 or not tight or logits < 4 * NOTABLE * needed:
        return None
    share = f"{100 * logits / needed:.0f} % of the memory ({format_bytes(logits)})"
    change, text = 'train.loss_chunk = "auto"', f"the logits are {share}"
    if plan.run.train.loss is not None:
        change = "fullshard.chunked_cross_entropy in train.loss"
        text = f"{text} as its operations run eagerly; a compiled or fused loss holds fewer"
    return PlanImprovement(change=change, gain=logits / needed, text=f"{change}: {text}")


def _iterate_changes(plan: Plan, hardware: Hardware, *, run: Run) -> Iterator[tuple[str, Run, Hardware]]:
    """Yields (change as text, run, hardware) for each change to try."""
    yield from iterate_runs_with_setting_unpinned(run, hardware)
    if run.run.compile is False and plan.device == "cuda":
        yield "run.compile = true", run_with_settings(run, {"run": {"compile": True}}), hardware
    twice = run_with_settings(run, {"train": {"global_batch": 2 * run.train.global_batch}})
    yield f"{2 * run.tokens_per_step:,} tokens a step, twice as many", twice, hardware
    if plan.device == "cuda" and (hardware.across is not None or hardware.nodes == 1):
        spread = hardware.across is not None
        more = hardware.with_rank_counts(
            nodes=hardware.nodes * (2 if spread else 1),
            ranks_per_node=hardware.ranks_per_node * (1 if spread else 2),
        )
        yield f"{more.world_size:,} GPUs, each with as many tokens a step as now", twice, more
