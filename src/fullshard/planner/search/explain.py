"""Explanation of a search's result: the largest cost that can be removed, and which change gains most."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, cast

from fullshard.errors import PlanError
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import SearchResult, iterate_runs_with_setting_unpinned, search
from fullshard.quantities import format_bytes, format_seconds
from fullshard.report.plan import HOST_WORK, recompute_text
from fullshard.spec.machine.hardware import MOST_RANKS, Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Tier
from fullshard.spec.value import FrozenModel

# Fraction of the step from which a difference is reported: it would be noticeable.
NOTABLE = 0.03
_COMPRESSIONS = ({"gather": "int8"}, {"reduce": "int8"}, {"reduce": "int8", "reduce_within": "bf16"})
Describe = Callable[[Run], ModelSpec]
Change = tuple[str, Run, Hardware]  # what changes, as text; the run and the machine with the change
Binding = Literal["memory", "links", "host", "computing"]


class PlanImprovement(FrozenModel):
    """A change of the run or of the machine, and what it gains."""

    change: str
    plan: Plan | None = None  # the best plan after the change; None if the gain is in memory alone
    gain: float  # extra tokens/s per rank, as a fraction; or the fraction of memory that it saves
    text: str


class PlanExplanation(FrozenModel):
    """Explanation of the best plan: its largest cost that comes from memory, links or the host.

    `binds` is the largest of these, in parts of the step, or `computing` if none is notable:

    memory   what the best plan in twice as much would save
    links    collectives that nothing hides, and what they slow down
    host     waiting for launches of the host, or for an offload target
    """

    binds: Binding
    because: str  # the share of the kernels, and this cost, as text
    lever: PlanImprovement | None  # the change that gains most, if any is notable
    compression: PlanImprovement | None = None  # of [communication]; no search chooses it, because it rounds

    def lines(self) -> tuple[str, ...]:
        """Returns the cost, and the changes that gain most, in one or two sentences each."""
        frees_memory = self.lever is not None and self.lever.plan is None
        kind = "would free memory" if frees_memory else "best of the other changes tried"
        changes = {kind: self.lever, "would lose precision (docs/communication.md)": self.compression}
        return self.because, *(f"{name}: {one.text}" for name, one in changes.items() if one is not None)


def explain_plan(
    found: SearchResult, hardware: Hardware, *, spec: ModelSpec, run: Run, describe: Describe | None = None
) -> PlanExplanation:
    """Returns the explanation of `found`, the result of a search of `run`.

    describe: returns the spec of a run with another recompute mode, or compiled, which `spec` may not have
    """
    plan = found.best
    assert plan is not None, "a plan that fits is explained"
    time = require_prediction(plan).time
    again = f" (recompute: {_percent(time.recompute / time.total)})" if time.recompute else ""
    because = f"kernels take {_percent((time.compute + time.recompute) / time.total)} of the step{again}"
    costs = [*_iterate_waits(plan), *_memory_costs(plan, found.best_in_twice, margin=run.memory_margin)]
    share, binds, text = max(costs)
    if share < NOTABLE:
        least = _percent(NOTABLE)
        binds, text = (
            "computing",
            f"links and the host cost less than {least} each, twice the memory gains less",
        )
    else:
        text = f"largest cost that can be removed: {text}"

    def spec_of(other: Run) -> ModelSpec:
        retraced = (other.recompute.mode, other.run.compile) != (run.recompute.mode, run.run.compile)
        return describe(other) if describe is not None and retraced else spec

    changes = iterate_changes(plan, hardware, run=run)
    compressions = _iterate_compressions(plan, hardware, run=run)
    return PlanExplanation(
        binds=binds,
        because=f"{because}; {text}",
        lever=find_best_change(plan, changes, spec_of=spec_of, best=_chunked_loss_improvement(plan)),
        compression=find_best_change(plan, compressions, spec_of=spec_of),
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _memory_costs(plan: Plan, other: Plan | None, *, margin: float) -> Iterator[tuple[float, Binding, str]]:
    """Yields what the plan `other`, which needs more memory than there is, would save; nothing if none."""
    if other is None:
        return
    own, faster = require_prediction(plan), require_prediction(other)
    lacks = faster.required_device_bytes / (1 - margin) - own.capacity_bytes
    if lacks > 0 and faster.tokens_per_second > own.tokens_per_second:
        share = 1 - own.tokens_per_second / faster.tokens_per_second
        gain = _percent(faster.tokens_per_second / own.tokens_per_second - 1)
        tier = other.run.offload.tier  # of more memory the planner would choose none if that fits
        kept = "" if tier == "none" else f' and offload.tier = "{tier}"'
        more = f"memory. With {format_bytes(lacks)} more per rank{kept}, the step would be {gain} faster"
        yield share, "memory", f"{more}: {format_difference(other, plan)}"


def _iterate_waits(plan: Plan) -> Iterator[tuple[float, Binding, str]]:
    """Yields (fraction of the step, cause, text) of what the step waits for."""
    prediction = require_prediction(plan)
    time = prediction.time
    waits = {
        "all-gather": time.exposed_all_gather,
        "reduce-scatter": time.exposed_reduce_scatter,
        "all-reduce": time.exposed_all_reduce,
        "kernels slowed by collectives beside them": time.contention,
        "exchanges of ranks that share matmuls, sequences or experts": time.model_parallel,
    }
    share, (name, most) = sum(waits.values()) / time.total, max(waits.items(), key=lambda one: one[1])
    text = f"communication, {_percent(share)} of the step, mainly {name} ({format_seconds(most)})"
    yield share, "links", text
    share = time.launch_gaps / time.total
    yield share, "host", f"waiting for the host to launch kernels, {_percent(share)} of the step"
    share, tier = time.offload / time.total, prediction.offload
    cause = "copies of activations" if tier is None else HOST_WORK[tier.step_bottleneck]
    yield share, "host", f"waiting for the host and its drive, {_percent(share)} of the step: {cause}"


def format_difference(plan: Plan, chosen: Plan) -> str:
    """Returns the settings in which `plan` differs: `microbatch 2 instead of 1, recompute none instead …`."""
    pairs = zip(_iterate_settings(plan), _iterate_settings(chosen), strict=True)
    texts = [f"{name}{own} instead of {other}" for (name, own), (_, other) in pairs if own != other]
    return ", ".join(texts) or "all else as here"


def _iterate_settings(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (name with a blank, value) of the settings that a search chooses."""
    run = plan.run
    over = "" if plan.shard_degree == 1 else f" over {plan.shard_degree:,}"
    yield "", f"{plan.strategy}{over}"
    yield "microbatch ", str(plan.microbatch)
    yield "gradients reduced ", "in each microbatch" if plan.sync_each_microbatch else "once a step"
    yield "recompute ", recompute_text(run)
    yield "", "compiled blocks" if run.run.compile is True else "eager blocks"
    yield "offload ", run.offload.tier
    yield "tensor parallel ", str(plan.tensor_parallel)
    yield "context parallel ", str(plan.context_parallel)
    yield "expert parallel ", str(plan.expert_parallel)


def find_best_change(
    plan: Plan, changes: Iterable[Change], *, spec_of: Describe, best: PlanImprovement | None = None
) -> PlanImprovement | None:
    """Returns the change that gains most tokens/s per rank, if it is notable and gains more than `best`.

    Otherwise returns `best`. `spec_of` describes the model of a changed run.
    """
    own = require_prediction(plan).tokens_per_second / plan.world_size
    tiers = (cast("Tier", plan.run.offload.tier),)
    for change, other, machine in changes:
        try:
            found = search(spec_of(other), machine, other, tiers=tiers, only_best=True).best
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


def iterate_changes(plan: Plan, hardware: Hardware, *, run: Run) -> Iterator[Change]:
    """Yields the changes to try.

    These are a pinned microbatch, recompute or sharding left to the planner, compiled blocks, a batch twice
    as large, and with it twice as many GPUs.
    """
    yield from iterate_runs_with_setting_unpinned(run, hardware)
    if run.run.compile is False and plan.device == "cuda":
        yield "run.compile = true", run.with_settings({"run": {"compile": True}}), hardware
    twice = run.with_settings({"train": {"global_batch": 2 * run.train.global_batch}})
    yield f"{2 * run.tokens_per_step:,} tokens a step, twice as many", twice, hardware
    spread = hardware.across is not None
    if plan.device == "cuda" and (spread or hardware.nodes == 1) and 2 * hardware.world_size <= MOST_RANKS:
        more = hardware.with_rank_counts(
            nodes=hardware.nodes * (2 if spread else 1),
            ranks_per_node=hardware.ranks_per_node * (1 if spread else 2),
        )
        yield f"{more.world_size:,} GPUs, each with as many tokens a step as now", twice, more


def _iterate_compressions(plan: Plan, hardware: Hardware, *, run: Run) -> Iterator[Change]:
    """Yields changes of [communication] that compress, if a notable part of the step waits for it."""
    waits, section = next(_iterate_waits(plan))[0], run.communication
    for settings in _COMPRESSIONS if waits >= NOTABLE and section.hook is None else ():
        is_open = all(getattr(section, key) in ("auto", "none", value) for key, value in settings.items())
        if is_open and (hardware.nodes > 1 or "reduce_within" not in settings):
            change = " and ".join(f'communication.{key} = "{value}"' for key, value in settings.items())
            yield change, run.with_settings({"communication": settings}), hardware
