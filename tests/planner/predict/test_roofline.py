"""A launch takes as long as the slower of its arithmetic and its bytes."""

import pytest

from fullshard.errors import PlanError
from fullshard.planner.predict.phases import (
    count_kernel_launches,
    kernel_seconds,
    nearest_dtype_rate_curve,
    phase_costs,
)
from fullshard.spec.machine.catalog import default_gpu_rates, read_catalog_chips
from fullshard.spec.machine.hardware import AttentionKernel, RatePoint, Rates
from fullshard.spec.model import (
    ComputeKind,
    Kernel,
    KernelIndexAndCount,
    LinearInMicrobatch,
    LiveTensorBytes,
    TracePhase,
)
from fullshard.spec.plan import Dtype
from tests.fakes.hardware import hardware_of

RATES = hardware_of().rates.model_copy(
    update={
        "matmul": {"bf16": (RatePoint(1e9, 1e14), RatePoint(1e12, 5e14))},
        "memory": (RatePoint(1e6, 1e12), RatePoint(1e9, 2e12)),
    }
)

H100 = next(chip for chip in read_catalog_chips() if chip.name == "H100 SXM")


def matmul(flops: float, *, count: float = 0.0) -> Kernel:
    return Kernel(
        kind="matmul", dtype="bf16", flops=LinearInMicrobatch(0, flops), bytes=LinearInMicrobatch(0, count)
    )


def test_a_matmul_is_bound_by_its_flops_or_by_its_bytes():
    assert kernel_seconds(matmul(1e12), RATES, microbatch=1) == pytest.approx(1e12 / 5e14)
    assert kernel_seconds(matmul(1e12, count=1e11), RATES, microbatch=1) == pytest.approx(1e11 / 2e12)


def test_a_dtype_without_a_rate_takes_the_nearest():
    curves = RATES.matmul
    assert nearest_dtype_rate_curve(curves, "fp16") is curves["bf16"]
    assert nearest_dtype_rate_curve({**curves, "tf32": curves["bf16"][:1]}, "fp32") == curves["bf16"][:1]
    with pytest.raises(PlanError, match="no rate for bf16"):
        nearest_dtype_rate_curve({}, "bf16")


def test_a_phase_is_the_sum_of_its_launches():
    kernels = (matmul(1e12), Kernel(kind="elementwise", dtype="bf16", bytes=LinearInMicrobatch(1e9, 0)))
    work = (KernelIndexAndCount(0, 2), KernelIndexAndCount(1, 10))
    phase = TracePhase(event="start", peaks=(LiveTensorBytes(),), end=LiveTensorBytes(), work=work)
    one, each = 1e12 / 5e14, 1e9 / 2e12
    (cost,) = phase_costs([phase], kernels, rates=RATES, microbatch=1)
    assert cost.launches == 12
    assert cost.seconds == pytest.approx(2 * one + 10 * each)


def test_a_matmul_of_unaligned_rows_reaches_a_part_of_the_rate_and_its_bytes_move_as_fast():
    rates = RATES.model_copy(update={"unaligned_matmul": 0.5})
    slow, moved = (
        one.model_copy(update={"unaligned": True}) for one in (matmul(1e12), matmul(1, count=1e11))
    )
    assert kernel_seconds(slow, rates, microbatch=1) == pytest.approx(
        2 * kernel_seconds(matmul(1e12), rates, microbatch=1)
    )
    assert kernel_seconds(moved, rates, microbatch=1) == pytest.approx(1e11 / 2e12)


def test_elementwise_operations_in_half_precision_reach_a_part_of_the_rate():
    rates = RATES.model_copy(update={"half_memory": 0.5})
    for dtype, part in (("fp32", 1.0), ("bf16", 0.5), ("fp16", 0.5)):
        kernel = Kernel(kind="elementwise", dtype=dtype, bytes=LinearInMicrobatch(1e9, 0))
        assert kernel_seconds(kernel, rates, microbatch=1) == pytest.approx(1e9 / 2e12 / part)


def test_attention_of_narrow_heads_reaches_a_part_of_the_rate():
    rates = RATES.model_copy(
        update={
            "attention_by_head_dim": (RatePoint(64, 0.5), RatePoint(128, 1.0)),
            "attention_backward_by_head_dim": (RatePoint(64, 0.8), RatePoint(128, 1.0)),
        }
    )

    def seconds(kind: ComputeKind, head_dim: int) -> float:
        kernel = matmul(1e12).model_copy(update={"kind": kind, "head_dim": head_dim})
        return kernel_seconds(kernel, rates, microbatch=1)

    wide = seconds("attention", 128)
    assert [seconds("attention", width) / wide for width in (32, 64, 256)] == pytest.approx([4, 2, 1])
    assert seconds("attention_backward", 64) / seconds("attention_backward", 128) == pytest.approx(1 / 0.8)


@pytest.mark.parametrize(
    ("kind", "fraction"), [("attention", 0.35 / 0.62), ("attention_backward", 0.30 / 0.50)]
)
def test_attention_within_documents_runs_at_the_rate_of_flash_attention(kind: ComputeKind, fraction: float):
    """On Hopper, where torch prefers cuDNN's kernel for all other attention."""

    def seconds(kernel: AttentionKernel, *, by_flash: bool) -> float:
        rates = default_gpu_rates(H100, kernel)
        launch = matmul(1e13).model_copy(update={"kind": kind, "head_dim": 128, "by_flash": by_flash})
        return kernel_seconds(launch, rates, microbatch=1)

    usual = seconds("cudnn_256", by_flash=False)
    assert usual / seconds("cudnn_256", by_flash=True) == pytest.approx(fraction)
    assert seconds("flash", by_flash=True) == seconds("flash", by_flash=False)
    assert seconds("flash", by_flash=True) == pytest.approx(seconds("cudnn_256", by_flash=True), rel=1e-3)


def test_tensor_collectives_copy_only_several_sequences_and_context_ones_always():
    gather = Kernel(kind="all_gather", dtype="bf16", bytes=LinearInMicrobatch(0, 1e11), axis="tensor")
    assert kernel_seconds(gather, RATES, microbatch=1) == 0
    assert kernel_seconds(gather, RATES, microbatch=2) == pytest.approx(2 * 2e11 / 2e12)
    context = gather.model_copy(update={"axis": "context"})  # ranks may have two pieces of a sequence each
    assert kernel_seconds(context, RATES, microbatch=1) == pytest.approx(2 * 1e11 / 2e12)


def test_the_matrices_of_a_grouped_matmul_are_timed_one_by_one():
    whole, piece = matmul(4e10, count=4e8), matmul(1e10, count=1e8)
    pieces = whole.model_copy(update={"pieces": LinearInMicrobatch(2, 1)})
    each = kernel_seconds(piece, RATES, microbatch=2)
    assert kernel_seconds(pieces, RATES, microbatch=2) == pytest.approx(4 * each)
    phase = TracePhase(
        event="start", peaks=(LiveTensorBytes(),), end=LiveTensorBytes(), work=(KernelIndexAndCount(0, 3),)
    )
    (cost,) = phase_costs([phase], (pieces,), rates=RATES, microbatch=2)
    assert cost.launches == 12


GROUPED = RATES.model_copy(
    update={"grouped_matmul": (RatePoint(1e9, 0.25), RatePoint(1e11, 0.8)), "grouped_tile_rows": 128.0}
)


def grouped(matrices: int, *, rows: float, flops_per_row: float = 1e8, dtype: Dtype = "bf16") -> Kernel:
    """Matrices of experts, each of which `rows` rows are multiplied with."""
    line = LinearInMicrobatch(matrices * rows * flops_per_row, 0)
    pieces, mean = LinearInMicrobatch(matrices, 0), LinearInMicrobatch(rows, 0)
    return Kernel(kind="matmul", dtype=dtype, flops=line, pieces=pieces, rows=mean)


def test_expert_matmul_without_grouped_kernel_takes_dense_time():
    dense = kernel_seconds(matmul(1e12), RATES, microbatch=1)
    assert kernel_seconds(grouped(1, rows=10_000), RATES, microbatch=1) == pytest.approx(dense)
    assert kernel_seconds(grouped(8, rows=10_000), RATES, microbatch=1) == pytest.approx(8 * dense)


def test_a_grouped_matmul_reaches_a_part_of_the_rate_of_large_ones_by_one_matrix_and_its_last_tile():
    seconds = kernel_seconds(grouped(16, rows=1_000), GROUPED, microbatch=1)
    assert seconds == pytest.approx(16 * 1e8 * (1_000 + 64) / (5e14 * 0.8))


@pytest.mark.parametrize("rates", [GROUPED, default_gpu_rates(H100, "cudnn")], ids=["example", "H100"])
def test_more_rows_per_expert_never_lower_the_rate_and_never_the_time(rates: Rates):
    rows = [2.0**power for power in range(1, 20)]
    seconds = [kernel_seconds(grouped(64, rows=each), rates, microbatch=1) for each in rows]
    speeds = [each / took for each, took in zip(rows, seconds, strict=True)]
    assert speeds == sorted(speeds)
    assert seconds == sorted(seconds)
    together = kernel_seconds(grouped(8, rows=8 * 512), rates, microbatch=1)
    assert together <= kernel_seconds(grouped(64, rows=512), rates, microbatch=1)


@pytest.mark.parametrize(
    ("rates", "dtype", "launches"), [(RATES, "bf16", 16), (GROUPED, "bf16", 1), (GROUPED, "fp32", 16)]
)
def test_grouped_kernel_is_one_launch(rates: Rates, dtype: Dtype, launches: int):
    kernel = grouped(16, rows=100, dtype=dtype)
    assert count_kernel_launches(kernel, rates, microbatch=1) == launches


def test_chips_with_a_grouped_kernel_have_its_rates():
    for chip in read_catalog_chips():
        curve = default_gpu_rates(chip, "flash").grouped_matmul
        assert (curve is not None) == chip.grouped_matmul
        parts = [part for _, part in curve or ()]
        assert parts == sorted(parts)
        assert all(0 < part <= 1 for part in parts)
    assert {chip.name.split()[0] for chip in read_catalog_chips() if chip.grouped_matmul} == {
        "H100",
        "H200",
        "B200",
        "GB200",
    }
