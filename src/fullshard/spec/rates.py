"""Rates of uncalibrated hardware, estimated from peaks and the figures in `rates.toml`."""

from functools import cache
from pathlib import Path

from pydantic import ConfigDict, Field

from fullshard.spec.hardware import Chip, ComputeDtype, Curve, Point, Rates
from fullshard.spec.toml_file import read_toml
from fullshard.spec.value import FrozenModel, NonNegativeFloat, NonNegativeInt, PositiveFloat

# (seconds of a launch at the chip's peak rate, fraction of the sustained rate), sorted by seconds.
Shape = tuple[tuple[float, float], ...]


class _Figures(FrozenModel):
    model_config = ConfigDict(extra="ignore")  # each table also has sources of its figures


class _Matmul(_Figures):
    sustained: PositiveFloat
    curve: Shape


class _Memory(_Figures):
    curve: Shape


class _Attention(_Figures):
    forward: PositiveFloat
    backward: PositiveFloat


class _Host(_Figures):
    copy_efficiency: PositiveFloat
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat


class _Overlap(_Figures):
    contention: NonNegativeFloat


class _MemoryUse(_Figures):
    usable_fraction: float = Field(gt=0, le=1)
    ecc_fraction: float = Field(gt=0, le=1)
    context_bytes: NonNegativeInt
    workspace_bytes: NonNegativeInt
    fragmentation: NonNegativeFloat


class _Cpu(_Figures):
    flops_per_second: PositiveFloat
    bytes_per_second: PositiveFloat
    collective_bytes_per_second: PositiveFloat
    collective_seconds: NonNegativeFloat
    launch_seconds: NonNegativeFloat
    unit_seconds: NonNegativeFloat
    source: str


class Efficiencies(FrozenModel):
    """The figures in `rates.toml`, whose comments explain each of them."""

    matmul: _Matmul
    memory: _Memory
    attention: _Attention
    host: _Host
    overlap: _Overlap
    memory_use: _MemoryUse
    cpu: _Cpu


@cache
def efficiencies() -> Efficiencies:
    """Reads the figures in `rates.toml`, which apply to all chips."""
    tables = read_toml(Path(__file__).with_name("rates.toml"))
    return Efficiencies.parse(tables, source="rates.toml")


def default_rates(
    chip: Chip, *, matmul_flops_per_second: float | None, attention: tuple[float, float] | None
) -> Rates:
    """Returns the rates of one GPU of this kind, estimated from its peaks and the curves in `rates.toml`.

        matmul rate(FLOP)  = sustained * curve(FLOP / peak FLOP/s)
        memory rate(bytes) = peak bytes/s * curve(bytes / peak bytes/s)

    matmul_flops_per_second: the sustained bf16 rate; other dtypes sustain the same fraction of their peaks
    attention: (forward, backward), the sustained fractions of the matmul peak; the curve is that of matmuls
    """
    table = efficiencies()
    known = chip.flops_per_second
    sustained = table.matmul.sustained
    if matmul_flops_per_second is not None:
        sustained = matmul_flops_per_second / known["bf16"]
    forward, backward = attention or (table.attention.forward, table.attention.backward)

    def by_dtype(part: float) -> dict[ComputeDtype, Curve]:
        return {dtype: _curve(peak, table.matmul.curve, part=part) for dtype, peak in known.items()}

    memory = _curve(chip.memory_bytes_per_second, table.memory.curve)
    return Rates(
        matmul=by_dtype(sustained),
        attention=by_dtype(forward),
        attention_backward=by_dtype(backward),
        memory=memory,
        optimizer=memory,
        launch_seconds=table.host.launch_seconds,
        unit_seconds=table.host.unit_seconds,
    )


def default_cpu_rates(cores: float) -> Rates:
    """Returns the rates of a CPU rank with `cores` cores, each with the rates per core in `rates.toml`."""
    cpu = efficiencies().cpu
    flops = (Point(1.0e6, cpu.flops_per_second * cores),)
    memory = (Point(1.0e4, cpu.bytes_per_second * cores),)
    return Rates(
        matmul={"fp32": flops},
        attention={"fp32": flops},
        attention_backward={"fp32": flops},
        memory=memory,
        optimizer=memory,
        launch_seconds=cpu.launch_seconds,
        unit_seconds=cpu.unit_seconds,
    )


def _curve(peak: float, shape: Shape, *, part: float = 1.0) -> Curve:
    return tuple(Point(_short(seconds * peak), _short(peak * reached * part)) for seconds, reached in shape)


def _short(figure: float) -> float:
    """Returns `figure` rounded to four significant digits, which is more than the sources have."""
    return float(f"{figure:.4g}")
