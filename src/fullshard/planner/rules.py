"""Common rules of thumb, evaluated for this case and compared with the planner's choice.

They reflect practice without a planner, with their sources as far as known. The planner uses none of them.
`docs/design/rules-of-thumb.md` explains who is right where they disagree.
"""

from fullshard.planner.step_time import StepTimer
from fullshard.planner.unit_costs import TICKS
from fullshard.quantities import format_bytes
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import ITEMSIZE, Plan
from fullshard.spec.run import Strategy
from fullshard.spec.value import FrozenModel

_ROOM = 0.5  # fraction of the device for state kept between steps; activations take the other half
_FAST = 4.0  # ratio of link rates, within to across nodes, from which shards stay within a node
_BUCKET = 25 * 2**20  # bytes; default bucket of DistributedDataParallel (`bucket_cap_mb`)


class Rule(FrozenModel):
    """A rule of thumb and its verdict."""

    name: str  # short name of the rule
    says: str  # its text
    figures: str  # figures of this case that it depends on
    advises: str  # the choice that it recommends
    chosen: str  # the planner's choice
    agrees: bool  # whether both are the same

    def lines(self) -> tuple[str, str]:
        """Returns the rule as two lines of text."""
        verdict = "as planned" if self.agrees else f"planned: {self.chosen}"
        return (f"rule of thumb, {self.name}: {self.says}", f"  {self.figures} -> {self.advises}; {verdict}")


def rules_of_thumb(plan: Plan, hardware: Hardware, *, spec: ModelSpec) -> tuple[Rule, ...]:
    """Returns each rule's verdict on the case in which `plan` was chosen."""
    rules = [_strategy(plan, hardware, numel=spec.numel), _offload(plan, hardware, numel=spec.numel)]
    rules.append(_precision(plan, hardware))
    if plan.world_size > 1:
        timer = StepTimer(spec, hardware)
        rules += [_prefetch(plan, timer), _bucket(plan, timer)]
    return tuple(rules)


def _strategy(plan: Plan, hardware: Hardware, *, numel: int) -> Rule:
    """Shard no more than memory requires (ZeRO, arXiv:1910.02054, table 1), and keep shards within fast links
    (MiCS, arXiv:2205.00119).
    """
    capacity, ranks = hardware.capacity_bytes, plan.world_size
    master, compute = ITEMSIZE[plan.precision.master], ITEMSIZE[plan.precision.param]
    whole = 4 * master * numel
    within, across = hardware.within.bytes_per_second, None
    if hardware.across is not None and hardware.nodes > 1:
        across = hardware.across.bytes_per_second
    ratio = within / across if across else None
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
    return Rule(
        name="strategy",
        says="shard only what takes over half of the memory, and within a node where links there are faster",
        figures=f"state {whole / capacity:.2f} × one device's memory, {sharded}{links}",
        advises=str(advice[0]),
        chosen=str(plan.strategy),
        agrees=plan.strategy in advice or ranks == 1,
    )


def _offload(plan: Plan, hardware: Hardware, *, numel: int) -> Rule:
    """Offload state that does not fit even when sharded (ZeRO-Offload, arXiv:2101.06840).

    The planner offloads only if the run names a target.
    """
    state = 4 * ITEMSIZE[plan.precision.master] * numel / (plan.shard_degree * plan.tensor_parallel)
    share, has_tier = state / hardware.capacity_bytes, plan.run.offload.takes_optimizer
    return Rule(
        name="offload",
        says="keep the optimizer on the host if sharded state takes over four fifths of the memory",
        figures=f"{format_bytes(state)} of {format_bytes(hardware.capacity_bytes)}, {100 * share:.0f} %",
        advises="offload the optimizer" if share > 0.8 else "keep all on the device",
        chosen=f"{plan.run.offload.tier} outside" if has_tier else "all on the device",
        agrees=(share > 0.8) == has_tier,
    )


def _precision(plan: Plan, hardware: Hardware) -> Rule:
    """Use bf16 if the chip has it, else fp16 with a loss scale. fp8 is not planned."""
    peaks = hardware.chip.flops_per_second
    best = next((dtype for dtype in ("bf16", "fp16") if dtype in peaks), "fp32")
    gain = peaks[best] / peaks["fp32"] if best in peaks and "fp32" in peaks else None  # type: ignore[index]
    times = f", {gain:.1f} × the arithmetic of fp32" if gain else ""
    return Rule(
        name="precision",
        says="compute in bf16 from Ampere on, in fp16 before, with fp32 masters",
        figures=f"{hardware.chip.name}: {', '.join(peaks) or 'no peaks known'}{times}",
        advises=best,
        chosen=plan.precision.param,
        agrees=plan.precision.param == best,
    )


def _prefetch(plan: Plan, timer: StepTimer) -> Rule:
    """Overlap hides communication if computing takes longer (FSDP, arXiv:2304.11277, section 3.3)."""
    demand, computing = timer.demand(plan), timer.computing(plan)
    sent = (demand.network + demand.apart + demand.replicas) / TICKS
    ratio = computing.device / TICKS / sent if sent else float("inf")
    explicit = ratio < 1
    mode = plan.run.prefetch.mode
    return Rule(
        name="prefetch",
        says="the engine's own prefetch, if there is more computing than communication; else prefetch deeper",
        figures=f"{ratio:.2f} seconds of computing a second of communication",
        advises="explicit" if explicit else "implicit",
        chosen=mode,
        agrees=(mode == "explicit") == explicit and mode != "none",
    )


def _bucket(plan: Plan, timer: StepTimer) -> Rule:
    """A collective should far exceed its latency (PyTorch DDP, arXiv:2006.15704, section 3.2.2)."""
    trace = timer.spec.trace(plan.run.recompute, plan.microbatch)
    units = timer.units(plan, trace)
    sent = [size.gathered for size in units.sizes if size.gathered]
    smallest = min(sent, default=0)
    small = sum(1 for count in sent if count < _BUCKET)
    return Rule(
        name="bucket size",
        says="send at least 25 MiB at once",
        figures=f"the smallest unit is {format_bytes(smallest)}; {small} kinds of {len(sent)} are below",
        advises="larger units" if small else "these units",
        chosen="these units",
        agrees=not small,
    )
