"""Explanation of a search's result: what limits the plan, the cost of other plans, and the rules of thumb."""

from collections.abc import Iterator, Sequence
from typing import Literal

from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.predict.unit_costs import TICKS
from fullshard.planner.search.advice import (
    NOTABLE,
    Lever,
    RunnerUpPlan,
    choose_runners_up,
    find_largest_lever,
    format_difference,
)
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.search import SearchResult, format_plan
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import ITEMSIZE, Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Run, Strategy
from fullshard.spec.value import FrozenModel

Binding = Literal["memory", "links", "host", "computing"]
_LIMITS: dict[Binding, str] = {
    "memory": "memory is the limit",
    "links": "the links are the limit",
    "host": "the host is the limit",
    "computing": "computing is the limit",
}
_LARGEST = 3
# The rules of thumb are compared with the choice, and never used for it: docs/design/rules-of-thumb.md.
_ROOM = 0.5  # fraction of the device for state kept between steps; activations take the other half
_FAST = 4.0  # ratio of link rates, within to across nodes, from which shards stay within a node
_BUCKET = 25 * 2**20  # bytes; default bucket of DistributedDataParallel (`bucket_cap_mb`)


class MemoryTermBytes(FrozenModel):
    """Name of a memory term of a prediction, and `count`, its bytes."""

    name: str
    count: int


class RuleOfThumb(FrozenModel):
    """A rule of thumb, its advice for this case, and the planner's choice."""

    name: str  # short name of the rule
    says: str  # its text
    figures: str  # figures of this case that it depends on
    advises: str  # the choice that the rule recommends
    chosen: str  # the planner's choice
    agrees: bool  # whether both are the same

    def format_lines(self) -> tuple[str, str]:
        """Returns the rule, its figures and its advice as two lines of text."""
        verdict = "as planned" if self.agrees else f"planned: {self.chosen}"
        return (f"rule of thumb, {self.name}: {self.says}", f"  {self.figures} -> {self.advises}; {verdict}")


class PlanExplanation(FrozenModel):
    """Explanation of the best plan, or of the closest if none fits.

    `binds` is the limit of the plan: what costs the largest part of the step, or `computing` if no other part
    is notable.

    memory      the seconds that the nearest notably faster plan would save, which does not fit
    links       waiting for collectives
    host        neither computing nor waiting for links: the host, or copies by FSDP2 or an offload target
    computing   the kernels themselves
    """

    plan: Plan
    fits: bool
    binds: Binding
    because: str  # reason for `binds`, as text
    largest: tuple[MemoryTermBytes, ...]  # the largest memory terms
    runners_up: tuple[RunnerUpPlan, ...]  # other plans of the front of speed and memory
    lever: Lever | None  # the change that gains most, if any is notable
    rules: tuple[RuleOfThumb, ...]

    def advice_lines(self) -> tuple[str, ...]:
        """Returns what binds, the largest lever, and the alternatives, a sentence or two each."""
        lines = [f"{_LIMITS[self.binds]}: {self.because}"]
        lines += [f"largest lever: {self.lever.text}"] if self.lever is not None else []
        named = self.fits and self.binds == "memory"  # `because` names the nearest step up
        others = [one for one in self.runners_up if not (named and one.lacks_bytes)]
        return (*lines, *(one.text(self.plan) for one in others))

    def format_lines(self) -> tuple[str, ...]:
        """Returns the explanation as lines of text."""
        largest = (f"{term.name.replace('_', ' ')} {format_bytes(term.count)}" for term in self.largest)
        return (
            f"{'chosen' if self.fits else 'closest'}: {format_plan(self.plan)}",
            *self.advice_lines(),
            f"largest: {', '.join(largest)}",
            *(line for rule in self.rules for line in rule.format_lines()),
        )


def explain_plan(found: SearchResult, hardware: Hardware, *, spec: ModelSpec, run: Run) -> PlanExplanation:
    """Returns the explanation of `found`, the result of a search of `run` with its front."""
    plan = found.best or found.closest
    assert plan is not None, "a search that considered something has a best plan or a closest"
    prediction = require_prediction(plan)
    runners_up = choose_runners_up(found, plan)
    binds, because = _binding_limit_and_reason(plan, found, runners_up=runners_up)
    terms = sorted(prediction.memory.terms().items(), key=lambda term: -term[1])[:_LARGEST]
    return PlanExplanation(
        plan=plan,
        fits=prediction.fits_in_memory,
        binds=binds,
        because=because,
        largest=tuple(MemoryTermBytes(name=name, count=count) for name, count in terms),
        runners_up=runners_up,
        lever=find_largest_lever(plan, hardware, spec=spec, run=run) if found.best else None,
        rules=_rule_of_thumb_verdicts(plan, hardware, spec=spec),
    )


def _binding_limit_and_reason(
    plan: Plan, found: SearchResult, *, runners_up: Sequence[RunnerUpPlan]
) -> tuple[Binding, str]:
    prediction = require_prediction(plan)
    if found.best is None:
        over = prediction.required_device_bytes - prediction.capacity_bytes
        return "memory", f"{format_bytes(over)} more than there is" if over > 0 else "the host has too little"
    limits = _notable_limits(prediction, runners_up, plan=plan)
    if (largest := max(limits, key=lambda one: one[0], default=None)) is not None:
        return largest[1:]
    total, time = prediction.time.total, prediction.time
    share = 100 * (time.compute + time.recompute) / total
    again = f", {100 * time.recompute / total:.0f} % of it to recompute activations" if time.recompute else ""
    return "computing", f"the model's kernels take {share:.0f} % of the step{again}"


def _notable_limits(
    prediction: Prediction, runners_up: Sequence[RunnerUpPlan], *, plan: Plan
) -> Iterator[tuple[float, Binding, str]]:
    """Yields (fraction of the step, limit, reason) of each limit that is notable."""
    total, time = prediction.time.total, prediction.time
    step_up = next((one for one in runners_up if one.lacks_bytes), None)
    if step_up is not None and step_up.speedup >= NOTABLE:
        more = f"{format_bytes(step_up.lacks_bytes)} more than the {format_bytes(prediction.capacity_bytes)}"
        change = f"{format_difference(step_up.plan, plan)}, {100 * step_up.speedup:.0f} % faster"
        yield step_up.speedup / (1 + step_up.speedup), "memory", f"with {more} per rank: {change}"
    if time.offload > NOTABLE * total:
        tier = prediction.offload
        cause = tier.step_bottleneck if tier is not None else "copies of activations"
        text = (
            f"{100 * time.offload / total:.0f} % of the step is waiting for the host and its drive: {cause}"
        )
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
        yield share, "links", f"{100 * share:.0f} % of the step waits for them, {most}"
    if time.engine > NOTABLE * total:
        share = time.engine / total
        yield share, "host", f"FSDP2's own copies and hooks are {100 * share:.0f} % of the step"


def _rule_of_thumb_verdicts(plan: Plan, hardware: Hardware, *, spec: ModelSpec) -> tuple[RuleOfThumb, ...]:
    """Returns all rules of thumb, each with its advice for this model and hardware."""
    rules = [_strategy_rule(plan, hardware, numel=spec.numel)]
    rules += [_offload_rule(plan, hardware, numel=spec.numel), _precision_rule(plan, hardware)]
    if plan.world_size > 1:
        timer = StepTimePredictor(spec, hardware)
        rules += [_prefetch_rule(plan, timer), _bucket_size_rule(plan, timer)]
    return tuple(rules)


def _strategy_rule(plan: Plan, hardware: Hardware, *, numel: int) -> RuleOfThumb:
    """Rule for the strategy: shard no more than memory requires (ZeRO, arXiv:1910.02054, table 1), and
    only over fast links (MiCS, arXiv:2205.00119).
    """
    capacity, ranks = hardware.device_bytes_limit, plan.world_size
    master, compute = ITEMSIZE[plan.precision.master], ITEMSIZE[plan.precision.param]
    whole = 4 * master * numel
    across = hardware.across if hardware.nodes > 1 else None
    ratio = hardware.within.bytes_per_second / across.bytes_per_second if across else None
    node = min(hardware.ranks_per_node, ranks)
    if whole <= _ROOM * capacity:
        advice = (Strategy.NO_SHARD,)
    elif compute * numel + whole / ranks <= _ROOM * capacity:
        advice = (Strategy.SHARD_GRAD_OP, Strategy.ZERO1)
    elif ratio is not None and ratio >= _FAST and whole / node <= _ROOM * capacity:
        advice = (Strategy.HYBRID_SHARD,)
    else:
        advice = (Strategy.FULL_SHARD,)
    links = f", links {ratio:.1f} : 1 within and across nodes" if ratio else ""
    sharded = f"{whole / ranks / capacity:.2f} × sharded"
    return RuleOfThumb(
        name="strategy",
        says="shard only what takes over half of the memory, and within a node where links there are faster",
        figures=f"state {whole / capacity:.2f} × one device's memory, {sharded}{links}",
        advises=str(advice[0]),
        chosen=str(plan.strategy),
        agrees=plan.strategy in advice or ranks == 1,
    )


def _offload_rule(plan: Plan, hardware: Hardware, *, numel: int) -> RuleOfThumb:
    """Rule for offload: only state that does not fit even when sharded (ZeRO-Offload, arXiv:2101.06840)."""
    state = 4 * ITEMSIZE[plan.precision.master] * numel / (plan.shard_degree * plan.tensor_parallel)
    share, has_tier = state / hardware.device_bytes_limit, plan.run.offload.offloads_optimizer
    return RuleOfThumb(
        name="offload",
        says="keep the optimizer on the host if sharded state takes over four fifths of the memory",
        figures=f"{format_bytes(state)} of {format_bytes(hardware.device_bytes_limit)}, {100 * share:.0f} %",
        advises="offload the optimizer" if share > 0.8 else "keep all on the device",
        chosen=f"{plan.run.offload.tier} outside" if has_tier else "all on the device",
        agrees=(share > 0.8) == has_tier,
    )


def _precision_rule(plan: Plan, hardware: Hardware) -> RuleOfThumb:
    """Rule for the compute dtype: bf16 if the chip has it, else fp16 with a loss scale; never fp8."""
    peaks = hardware.chip.flops_per_second
    best = next((dtype for dtype in ("bf16", "fp16") if dtype in peaks), "fp32")
    gain = peaks[best] / peaks["fp32"] if best in peaks and "fp32" in peaks else None  # type: ignore[index]
    times = f", {gain:.1f} × the arithmetic of fp32" if gain else ""
    return RuleOfThumb(
        name="precision",
        says="compute in bf16 from Ampere on, in fp16 before, with fp32 masters",
        figures=f"{hardware.chip.name}: {', '.join(peaks) or 'no peaks known'}{times}",
        advises=best,
        chosen=plan.precision.param,
        agrees=plan.precision.param == best,
    )


def _prefetch_rule(plan: Plan, timer: StepTimePredictor) -> RuleOfThumb:
    """Rule for prefetch: deeper if communication is longer than computing (FSDP, arXiv:2304.11277, 3.3)."""
    demand, computing = timer.stream_minima(plan), timer.compute_ticks(plan)
    sent = (demand.network + demand.apart + demand.replicas) / TICKS
    ratio = computing.device / TICKS / sent if sent else float("inf")
    explicit, mode = ratio < 1, plan.run.prefetch.mode
    return RuleOfThumb(
        name="prefetch",
        says="FSDP2's own prefetch, if there is more computing than communication; else prefetch deeper",
        figures=f"{ratio:.2f} seconds of computing a second of communication",
        advises="explicit" if explicit else "implicit",
        chosen=mode,
        agrees=(mode == "explicit") == explicit and mode != "none",
    )


def _bucket_size_rule(plan: Plan, timer: StepTimePredictor) -> RuleOfThumb:
    """Rule for unit sizes: collectives take far longer than their latency (DDP, arXiv:2006.15704, 3.2.2)."""
    sent = [size.gathered for size in timer.unit_costs(plan).sizes if size.gathered]
    smallest = min(sent, default=0)
    small = sum(count < _BUCKET for count in sent)
    return RuleOfThumb(
        name="bucket size",
        says="send at least 25 MiB at once",
        figures=f"the smallest unit is {format_bytes(smallest)}; {small} kinds of {len(sent)} are below",
        advises="larger units" if small else "these units",
        chosen="these units",
        agrees=not small,
    )
