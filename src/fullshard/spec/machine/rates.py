"""Rates of uncalibrated hardware, estimated from peaks and the figures in `rates.toml`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, Field

from fullshard.spec.machine.catalog import CatalogChip
from fullshard.spec.machine.hardware import AttentionKernel, ComputeDtype, Curve, RatePoint, Rates
from fullshard.spec.value import FrozenModel, NonNegativeFloat, NonNegativeInt, PositiveFloat
from fullshard.system.toml_file import read_toml

# (seconds of a launch at the chip's peak rate, fraction of the sustained rate), sorted by seconds.
Shape = tuple[tuple[float, float], ...]


class _RatesTomlTable(FrozenModel):
    model_config = ConfigDict(extra="ignore")  # each table also has sources of its figures


class _MatmulEfficiency(_RatesTomlTable):
    sustained: PositiveFloat
    in_steps: PositiveFloat
    single_rank: PositiveFloat
    fp8: PositiveFloat
    unaligned: float = Field(gt=0, le=1)
    curve: Shape


class _GroupedMatmulEfficiency(_RatesTomlTable):
    tile_rows: PositiveFloat
    curve: Shape


class _MemoryBandwidthEfficiency(_RatesTomlTable):
    curve: Shape


class _AttentionEfficiency(_RatesTomlTable):
    forward: PositiveFloat
    backward: PositiveFloat
    forward_by_head_dim: Curve
    backward_by_head_dim: Curve


class _HostRates(_RatesTomlTable):
    copy_efficiency: PositiveFloat
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat


class _OverlapContention(_RatesTomlTable):
    contention: NonNegativeFloat


class _DeviceMemoryOverheads(_RatesTomlTable):
    usable_fraction: float = Field(gt=0, le=1)
    ecc_fraction: float = Field(gt=0, le=1)
    context_bytes: NonNegativeInt
    workspace_bytes: NonNegativeInt
    fragmentation: NonNegativeFloat


class _CpuCoreRates(_RatesTomlTable):
    flops_per_second: PositiveFloat
    bytes_per_second: PositiveFloat
    collective_bytes_per_second: PositiveFloat
    collective_seconds: NonNegativeFloat
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat
    source: str


class DefaultRateFigures(FrozenModel):
    """The figures in `rates.toml`, whose comments explain each of them."""

    matmul: _MatmulEfficiency
    grouped_matmul: _GroupedMatmulEfficiency
    memory: _MemoryBandwidthEfficiency
    attention: Mapping[AttentionKernel, _AttentionEfficiency]
    host: _HostRates
    overlap: _OverlapContention
    memory_use: _DeviceMemoryOverheads
    cpu: _CpuCoreRates


@cache
def read_default_rate_figures() -> DefaultRateFigures:
    """Reads the figures in `rates.toml`, which apply to all chips."""
    tables = read_toml(Path(__file__).with_name("rates.toml"))
    return DefaultRateFigures.parse(tables, source="rates.toml")


def default_gpu_rates(chip: CatalogChip, attention_kernel: AttentionKernel) -> Rates:
    """Returns the rates of one GPU of this kind, estimated from its peaks and the curves in `rates.toml`.

        matmul rate(FLOP)  = sustained * curve(FLOP / peak FLOP/s)
        memory rate(bytes) = peak bytes/s * curve(bytes / peak bytes/s)
        grouped matmul     = matmul rate of large matrices * curve(FLOP of one matrix / peak FLOP/s)

    `chip.matmul_flops_per_second` is the sustained bf16 rate; other dtypes sustain the same fraction of their
    peaks, and fp8 a smaller one. `chip.attention` has the fractions of the matmul peak that each kernel of
    attention sustains with heads of 128; the curve is that of matmuls.
    """
    table = read_default_rate_figures()
    known = chip.flops_per_second
    fitted, alone = chip.matmul_flops_per_second, chip.matmul_alone_flops_per_second
    if fitted is None and alone is not None:
        fitted = alone * table.matmul.in_steps
    sustained = table.matmul.sustained if fitted is None else fitted / known["bf16"]
    known_kernel = table.attention[attention_kernel]
    forward, backward = chip.attention.get(attention_kernel, (known_kernel.forward, known_kernel.backward))

    def curves_by_dtype(part: float) -> dict[ComputeDtype, Curve]:
        return {dtype: _rate_curve(peak, table.matmul.curve, part=part) for dtype, peak in known.items()}

    matmul = curves_by_dtype(sustained)
    if "fp8" in known:
        part = sustained * table.matmul.fp8
        matmul["fp8"] = _rate_curve(known["fp8"], table.matmul.curve, part=part)
    memory = _rate_curve(chip.memory_bytes_per_second, table.memory.curve)
    return Rates(
        matmul=matmul,
        single_rank_matmul=table.matmul.single_rank,
        attention=curves_by_dtype(forward),
        attention_backward=curves_by_dtype(backward),
        attention_by_head_dim=known_kernel.forward_by_head_dim,
        attention_backward_by_head_dim=known_kernel.backward_by_head_dim,
        grouped_matmul=_grouped_matmul_parts(known["bf16"]) if chip.grouped_matmul else None,
        grouped_tile_rows=table.grouped_matmul.tile_rows if chip.grouped_matmul else 0.0,
        memory=memory,
        optimizer=memory,
        launch_seconds=table.host.launch_seconds,
        unit_seconds=table.host.unit_seconds,
        unaligned_matmul=table.matmul.unaligned,
    )


def default_cpu_rates(cores: float) -> Rates:
    """Returns the rates of a CPU rank with `cores` cores, each with the rates per core in `rates.toml`."""
    cpu = read_default_rate_figures().cpu
    flops = (RatePoint(1.0e6, cpu.flops_per_second * cores),)
    memory = (RatePoint(1.0e4, cpu.bytes_per_second * cores),)
    return Rates(
        matmul={"fp32": flops},
        attention={"fp32": flops},
        attention_backward={"fp32": flops},
        memory=memory,
        optimizer=memory,
        launch_seconds=cpu.launch_seconds,
        unit_seconds=cpu.unit_seconds,
    )


def _rate_curve(peak: float, shape: Shape, *, part: float = 1.0) -> Curve:
    points = ((seconds * peak, peak * reached * part) for seconds, reached in shape)
    return tuple(RatePoint(_round_to_four_digits(size), _round_to_four_digits(rate)) for size, rate in points)


def _grouped_matmul_parts(peak: float) -> Curve:
    points = read_default_rate_figures().grouped_matmul.curve
    return tuple(RatePoint(_round_to_four_digits(seconds * peak), part) for seconds, part in points)


def _round_to_four_digits(figure: float) -> float:
    """Returns `figure` rounded to four significant digits, which is more than the sources have."""
    return float(f"{figure:.4g}")
