"""Explanation of a search's result: what limits the plan, the cost of other plans, and the rules of thumb."""

from typing import Literal

from fullshard.planner.search import SearchResult, format_plan, require_prediction
from fullshard.planner.step_time import StepTimePredictor
from fullshard.planner.unit_costs import TICKS
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import ITEMSIZE, Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Strategy
from fullshard.spec.value import FrozenModel

Binding = Literal["memory", "links", "host", "computing"]
_LARGEST = 3
_RUNNERS_UP = 6
# Fraction of the step from which a term is reported: another plan, or other hardware, would be noticeable.
_NOTABLE = 0.05
# The rules of thumb are compared with the choice, and never used for it: docs/design/rules-of-thumb.md.
_ROOM = 0.5  # fraction of the device for state kept between steps; activations take the other half
_FAST = 4.0  # ratio of link rates, within to across nodes, from which shards stay within a node
_BUCKET = 25 * 2**20  # bytes; default bucket of DistributedDataParallel (`bucket_cap_mb`)


class MemoryTermBytes(FrozenModel):
    """Name of a memory term of a prediction, and `count`, its bytes."""

    name: str
    count: int


class RunnerUpPlan(FrozenModel):
    """A plan that was not chosen, compared with the chosen one."""

    plan: Plan
    seconds: float  # extra seconds per step over the chosen plan; negative if it is faster
    needed_bytes: int  # extra bytes over the chosen plan; negative if it needs fewer
    lacks_bytes: int = 0  # bytes by which it does not fit; 0 if it fits


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

    Values of `binds`, the limit on the plan:

    memory      a faster plan is known, and does not fit
    links       a notable part of the step is waiting for collectives
    host        a notable part is neither computing nor waiting for links: the host, or copies by FSDP2 or an
                offload target
    computing   only the kernels themselves
    """

    plan: Plan
    fits: bool
    binds: Binding
    because: str  # reason for `binds`, as text
    largest: tuple[MemoryTermBytes, ...]  # the largest memory terms
    runners_up: tuple[RunnerUpPlan, ...]
    rules: tuple[RuleOfThumb, ...]

    def format_lines(self) -> tuple[str, ...]:
        """Returns the explanation as lines of text."""
        largest = (f"{term.name.replace('_', ' ')} {format_bytes(term.count)}" for term in self.largest)
        return (
            f"{'chosen' if self.fits else 'closest'}: {format_plan(self.plan)}",
            f"binds: {self.binds}; {self.because}",
            f"largest: {', '.join(largest)}",
            *(_format_runner_up(one) for one in self.runners_up),
            *(line for rule in self.rules for line in rule.format_lines()),
        )


def explain_plan(found: SearchResult, hardware: Hardware, *, spec: ModelSpec) -> PlanExplanation:
    """Returns the explanation of `found`, the result of a search over `spec` and `hardware`."""
    plan = found.best or found.closest
    assert plan is not None, "a search that considered something has a best plan or a closest"
    prediction = require_prediction(plan)
    binds, because = _binding_limit_and_reason(found, prediction)
    terms = sorted(prediction.memory.terms().items(), key=lambda term: -term[1])[:_LARGEST]
    return PlanExplanation(
        plan=plan,
        fits=prediction.fits_in_memory,
        binds=binds,
        because=because,
        largest=tuple(MemoryTermBytes(name=name, count=count) for name, count in terms),
        runners_up=_choose_runners_up(found, plan),
        rules=_rule_of_thumb_verdicts(plan, hardware, spec=spec),
    )


def _binding_limit_and_reason(found: SearchResult, prediction: Prediction) -> tuple[Binding, str]:
    fastest = require_prediction(found.fastest)
    if found.best is None:
        over = prediction.required_device_bytes - prediction.capacity_bytes
        return "memory", f"{format_bytes(over)} more than there is" if over > 0 else "the host has too little"
    total, time = prediction.time.total, prediction.time
    saved = total - fastest.time.total
    if not fastest.fits_in_memory and saved > _NOTABLE * total:
        over = format_bytes(fastest.required_device_bytes - fastest.capacity_bytes)
        faster = format_plan(found.fastest)
        return "memory", f"with {over} more, {faster} would save {format_seconds(saved)} a step"
    if time.offload > _NOTABLE * total:
        tier = prediction.offload
        binds = tier.step_bottleneck if tier is not None else "copies of activations"
        share = 100 * time.offload / total
        return "host", f"{share:.0f} % of the step is waiting for the host and its drive: {binds}"
    waits = {
        "all-gather": time.exposed_all_gather,
        "reduce-scatter": time.exposed_reduce_scatter,
        "all-reduce": time.exposed_all_reduce,
        "contention with collectives": time.contention,
        "ranks that share matmuls": time.tensor_parallel,
    }
    if sum(waits.values()) > _NOTABLE * total:
        name, longest = max(waits.items(), key=lambda one: one[1])
        share = 100 * sum(waits.values()) / total
        return "links", f"{share:.0f} % of the step, most of it {name} ({format_seconds(longest)})"
    if time.engine > _NOTABLE * total:
        return "host", f"FSDP2's own copies and hooks are {100 * time.engine / total:.0f} % of the step"
    share = 100 * (time.compute + time.recompute) / total
    again = f", {100 * time.recompute / total:.0f} % a second time" if time.recompute else ""
    return "computing", f"{share:.0f} % of the step{again}"


def _choose_runners_up(found: SearchResult, chosen: Plan) -> tuple[RunnerUpPlan, ...]:
    """Returns the second fastest plan, the fastest regardless of memory, and the best per strategy."""
    best = require_prediction(chosen)
    others: list[Plan] = []
    for plan in (*found.ranked[1:2], found.fastest, *found.by_strategy.values()):
        if plan not in (chosen, *others):
            others.append(plan)
    found_up = (
        RunnerUpPlan(
            plan=plan,
            seconds=prediction.time.total - best.time.total,
            needed_bytes=prediction.required_device_bytes - best.required_device_bytes,
            lacks_bytes=max(0, prediction.required_device_bytes - prediction.capacity_bytes),
        )
        for plan, prediction in zip(others, map(require_prediction, others), strict=True)
    )
    ranked = sorted(found_up, key=lambda one: (one.lacks_bytes > 0, one.seconds))
    return (*ranked[:_RUNNERS_UP], *(one for one in ranked[_RUNNERS_UP:] if one.plan == found.fastest))


def _format_runner_up(one: RunnerUpPlan) -> str:
    time = f"{'+' if one.seconds >= 0 else '-'}{format_seconds(abs(one.seconds))}"
    space = f"{'+' if one.needed_bytes >= 0 else ''}{format_bytes(one.needed_bytes)}"
    lacks = f" (does not fit: {format_bytes(one.lacks_bytes)} over)" if one.lacks_bytes else ""
    return f"instead: {format_plan(one.plan)}: {time} a step, {space}{lacks}"


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
