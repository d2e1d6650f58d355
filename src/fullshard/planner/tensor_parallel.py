"""Tensor-parallel axis: T adjacent ranks share each block's matmuls.

[Note: tensor parallel]
The form is that of Korthikanti et al., arXiv:2205.05198, with sequence parallelism between the matmuls, as an
approximation unit by unit. b: sequences per microbatch, s: tokens per sequence, d: width of the model.

parameters    matrices are split over T, by rows or columns; vectors (norms) are replicated on all T ranks.
              They are then sharded over world / T ranks, so a rank's share of a matrix does not change.
computing     each launch does 1/T of its FLOP and moves 1/T of its bytes; the number of launches is the
              same. The embedding, the head and the loss are split over the vocabulary.
activations   1/T of everything saved (their equation 4), plus the bytes gathered at once: in forward one
              b s d input, in backward that input again and the output's gradient. Of each, the (T - 1) / T
              that the rank lacks is counted, twice in either direction.
collectives   a block gathers the sequence before attention and before the feed-forward, and reduce-scatters
              after each: two of each in forward and two of each in backward, b s d values each. Recompute
              gathers again, in proportion to the matmuls that it repeats. The embedding and the head send
              b s d once in forward and once in backward. Computing waits for each; nothing overlaps them.

Left out:

- the all-reduce of the norms' gradients and of the loss (b s numbers);
- keys and values repeated if T exceeds their heads;
- the (T - 1) / T of the gathered inputs that training saves for backward, unless it recomputes them;
- the input that Megatron gathers a second time for the weights' gradient, overlapped with the input's
  gradient.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod

from fullshard.errors import PlanError
from fullshard.planner.collectives import collective_seconds, shard_group_layout
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec, TracePhase, UnitSpec
from fullshard.spec.model_section import DecoderConfig
from fullshard.spec.plan import ITEMSIZE, Plan

_OF_A_BLOCK = 4  # collectives of a block per direction


def split_parameter_shape(shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """Returns the shape of a rank's part: the first dim of a matrix that `degree` divides is split."""
    if degree == 1 or len(shape) < 2:
        return shape
    for dim, rows in enumerate(shape):
        if rows % degree == 0:
            return (*shape[:dim], rows // degree, *shape[dim + 1 :])
    return shape


def hidden_width(spec: ModelSpec) -> int:
    """Returns the width d of the hidden state: the size that occurs in most parameters of a block."""
    blocks = [unit for unit in spec.units if unit.is_block] or list(spec.units)
    counted = Counter(dim for p in blocks[0].parameters for dim in set(p.shape))
    return max(counted, key=lambda dim: (counted[dim], dim)) if counted else 1


def hidden_state_bytes(spec: ModelSpec, microbatch: int) -> int:
    """Returns the bytes of b s d values (the hidden state of a microbatch) in the compute dtype."""
    return microbatch * spec.sequence_length * hidden_width(spec) * ITEMSIZE[spec.precision.param]


def gathered_sequence_bytes(spec: ModelSpec, microbatch: int, *, degree: int) -> int:
    """Returns the bytes of gathered sequence parts that a rank allocates while a block computes."""
    return 2 * hidden_state_bytes(spec, microbatch) * (degree - 1) // degree


def check_tensor_parallel_split(spec: ModelSpec, plan: Plan) -> None:
    """Raises PlanError if T does not divide a block's matrices, or the decoder's heads, kv_heads or d_ff."""
    degree = plan.tensor_parallel
    if degree == 1:
        return
    matrices = [p for u in spec.units if u.is_block for p in u.parameters if len(p.shape) > 1]
    whole = [p.name for p in matrices if split_parameter_shape(p.shape, degree) == p.shape]
    model, wrong, shapes = plan.run.model, list[str](), [set(p.shape) for p in matrices]
    # A saved spec may come with a run whose model has other sizes.
    if isinstance(model, DecoderConfig) and {model.d_ff, model.d_model} in shapes:
        wrong = [name for name in ("d_ff", "heads") if getattr(model, name) % degree]
        wrong += ["kv_heads"] if model.kv_heads % degree and degree % model.kv_heads else []
    if whole or wrong:
        got = ", ".join(f"model.{name} = {getattr(model, name)}" for name in wrong)
        raise PlanError(
            f"a block of {spec.name} cannot be split over {degree} ranks.",
            got=f"sharding.tensor_parallel = {degree}; {got or ', '.join(whole[:3])}",
            why="each rank computes whole heads, and an equal share of the rows of each matrix",
            fix="sharding.tensor_parallel = a divisor of the heads and of d_ff",
        )


def tp_seconds_by_phase(
    spec: ModelSpec, phases: Sequence[TracePhase], *, plan: Plan, units: Sequence[int], hardware: Hardware
) -> list[float]:
    """Returns the seconds of tensor-parallel collectives in each phase. See [Note: tensor parallel].

    `units`: for each traced unit, the first unit of the model.
    """
    degree, per_node = plan.tensor_parallel, hardware.ranks_per_node
    if degree == 1:
        return [0.0] * len(phases)
    group = shard_group_layout(degree, per_node=per_node, world_size=plan.world_size)
    count = hidden_state_bytes(spec, plan.microbatch)
    both = sum(
        collective_seconds(kind, count, group=group, hardware=hardware)
        for kind in ("all_gather", "reduce_scatter")
    )
    forward, backward = (
        _matmul_flops_by_unit(spec, phases, event=event, microbatch=plan.microbatch)
        for event in ("pre_forward", "pre_backward")
    )
    sent: list[float] = []
    for phase in phases:
        times = 0.0
        if phase.event in ("pre_forward", "pre_backward") and phase.unit >= 0:
            unit = spec.units[units[phase.unit]]
            times = _count_collectives_per_direction(unit)
            first = forward[phase.unit]
            if unit.is_block and phase.event == "pre_backward" and first:
                times *= 1 + min(1.0, max(0.0, backward[phase.unit] / first - 2))
        sent.append(times * both / 2)
    return sent


def _count_collectives_per_direction(unit: UnitSpec) -> float:
    """Returns the number of a unit's collectives in forward, which equals that in backward."""
    if unit.is_block:
        return _OF_A_BLOCK
    return 1 if any(len(p.shape) > 1 and prod(p.shape) for p in unit.parameters) else 0


def _matmul_flops_by_unit(
    spec: ModelSpec, phases: Sequence[TracePhase], *, event: str, microbatch: int
) -> defaultdict[int, float]:
    """Returns the FLOP of matmuls in the phases that `event` opens, by traced unit."""
    found = defaultdict[int, float](float)
    for phase in phases:
        if phase.event == event and phase.unit >= 0:
            work = ((spec.kernels[one.kernel], one.times) for one in phase.work)
            matmuls = ((kernel.flops, times) for kernel, times in work if kernel.kind == "matmul")
            found[phase.unit] += sum(flops.value_at(microbatch) * times for flops, times in matmuls)
    return found
