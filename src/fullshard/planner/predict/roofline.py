"""Roofline model: each launch takes as long as the slower of its arithmetic and its memory traffic.

Williams et al., "Roofline", CACM 52(4), 2009. The rates are data (`Rates`): curves over the size of a launch.

[Note: grouped matmul]
The matrices of a mixture's experts are multiplied in one launch on Hopper and on Blackwell of data centres,
in bf16. With m rows of each matrix on average and tiles of t rows, the kernel computes m + t / 2 of them,
since the rows that come to an expert fill its last tile by half on average. At f FLOP per matrix so computed:

    rate = large matmul · part(f)

Elsewhere, and in other dtypes, torch multiplies one matrix after the other (`_grouped_mm_fallback`): each is
a launch with the rate of a matmul of its size.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fullshard.errors import PlanError
from fullshard.spec.machine.hardware import ComputeDtype, Curve, Rates, interpolate_rate
from fullshard.spec.model import Kernel, KernelKind, LinearInMicrobatch, TracePhase
from fullshard.spec.plan import Dtype

# Fallback order if a dtype has no curve: first dtypes of the same compute units, then wider ones.
_NEAREST: dict[Dtype | Literal["fp8"], tuple[ComputeDtype, ...]] = {
    "fp8": ("fp8", "bf16"),  # where fp8 was not measured, it is at least as fast as bf16
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
}

_NO_ROWS = LinearInMicrobatch()
# Times that the tensor of a collective is read or written in copies, before and after it. Rows of experts are
# copied by operations of their own.
_PASSES_OF_COPIES: dict[KernelKind, int] = {
    "all_gather": 2,
    "reduce_scatter": 2,
    "all_to_all": 4,
    "all_reduce": 2,
}


class PhaseSecondsAndLaunches(NamedTuple):
    """Cost of a phase: device time in `seconds`, and the number of kernels that the host launches."""

    seconds: float
    launches: float


def kernel_seconds(kernel: Kernel, rates: Rates, *, microbatch: int) -> float:
    """Returns the seconds of one launch of a kernel, or of all of its pieces.

        max(flops / rate(flops), bytes / memory(bytes))

    The FLOP rate is that of the kernel's kind and nearest dtype, times `rates.unaligned_matmul` for matrices
    that tensor cores cannot load in vectors, or a factor for the width of attention's heads. Elementwise
    launches count bytes only, in half precision at a part of the rate. See [Note: grouped matmul] for the
    rate of experts.
    Of collectives, only the copies around them count here: see `planner.collectives`.
    """
    if kernel.axis is not None:
        return memory_seconds(_copied_bytes(kernel, microbatch), rates.memory)
    pieces = count_pieces(kernel, rates, microbatch=microbatch)
    moved = pieces * memory_seconds(kernel.bytes.value_at(microbatch) / pieces, rates.memory)
    if kernel.kind not in ("matmul", "attention", "attention_backward"):
        return moved / (rates.half_memory if kernel.dtype in ("bf16", "fp16") else 1.0)
    flops = kernel.flops.value_at(microbatch)
    if flops <= 0:
        return moved
    curve = nearest_dtype_rate_curve(getattr(rates, kernel.kind), kernel.dtype)
    rate = interpolate_rate(curve, flops / pieces) * (rates.unaligned_matmul if kernel.unaligned else 1.0)
    if rates.grouped_matmul is not None and _is_one_grouped_launch(kernel, rates):
        rows = kernel.rows.value_at(microbatch)
        flops *= (rows + rates.grouped_tile_rows / 2) / rows
        each = flops / max(1.0, kernel.pieces.value_at(microbatch))
        rate = curve[-1].rate * interpolate_rate(rates.grouped_matmul, each)
    if kernel.head_dim:
        forward = kernel.kind == "attention"
        widths = rates.attention_by_head_dim if forward else rates.attention_backward_by_head_dim
        rate *= interpolate_rate(widths, kernel.head_dim)
    return max(flops / rate, moved)


def _copied_bytes(kernel: Kernel, microbatch: int) -> float:
    """Returns the bytes that are read and written to bring the parts of a collective into the order of ranks.

    The parts of one sequence are in this order already, unless each rank has two pieces of it.
    """
    if kernel.axis == "tensor" and microbatch == 1:
        return 0.0
    return _PASSES_OF_COPIES.get(kernel.kind, 0) * kernel.bytes.value_at(microbatch)


def count_pieces(kernel: Kernel, rates: Rates, *, microbatch: int) -> float:
    """Returns the number of launches of which a kernel consists, 1 or more."""
    return 1.0 if _is_one_grouped_launch(kernel, rates) else max(1.0, kernel.pieces.value_at(microbatch))


def _is_one_grouped_launch(kernel: Kernel, rates: Rates) -> bool:
    return kernel.rows != _NO_ROWS and kernel.dtype == "bf16" and rates.grouped_matmul is not None


def memory_seconds(count: float, curve: Curve) -> float:
    """Returns the seconds of one launch that reads and writes `count` bytes in all; 0 for 0 bytes."""
    return count / interpolate_rate(curve, count) if count > 0 else 0.0


def nearest_dtype_rate_curve(curves: Mapping[ComputeDtype, Curve], dtype: Dtype | Literal["fp8"]) -> Curve:
    """Returns the curve of `dtype`, or of the nearest dtype that has one. Raises PlanError if none has."""
    for name in _NEAREST[dtype]:
        if name in curves:
            return curves[name]
    raise PlanError(
        f"the hardware has no rate for {dtype}.",
        got=f"rates for {', '.join(curves) or 'nothing'}",
        fix="fullshard calibrate, which measures them",
    )


def phase_costs(
    phases: Sequence[TracePhase],
    kernels: Sequence[Kernel],
    *,
    rates: Rates,
    microbatch: int,
    received: float = 1.0,
) -> tuple[PhaseSecondsAndLaunches, ...]:
    """Returns the cost of each phase. `received`: rows that come to this rank's experts, over the mean."""
    seconds: dict[int, float] = {}
    costs: list[PhaseSecondsAndLaunches] = []
    for phase in phases:
        total, launches = 0.0, 0.0
        for index, times in phase.work:
            if index not in seconds:
                factor = received if kernels[index].received else 1.0
                seconds[index] = factor * kernel_seconds(kernels[index], rates, microbatch=microbatch)
            total += seconds[index] * times
            launches += times * count_pieces(kernels[index], rates, microbatch=microbatch)
        costs.append(PhaseSecondsAndLaunches(total, launches))
    return tuple(costs)
