"""The catalog of known accelerators and links, and the rates of uncalibrated hardware that follow from it.

The figures are in `catalog.toml`, `links.toml` and `rates.toml`.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fullshard.spec.machine.hardware import (
    AttentionKernel,
    Chip,
    CollectiveRate,
    ComputeDtype,
    Curve,
    Link,
    RatePoint,
    Rates,
)
from fullshard.spec.value import FrozenModel, PositiveFloat, PositiveInt
from fullshard.system.small_files import read_toml


class CatalogChip(FrozenModel):
    """A chip in `catalog.toml`, whose head explains each field."""

    name: str
    device_names: tuple[str, ...]
    aliases: tuple[str, ...]
    memory_gib: PositiveInt
    memory_bytes_per_second: PositiveFloat
    flops_per_second: Mapping[ComputeDtype, PositiveFloat]
    source: str
    matmul_flops_per_second: PositiveFloat | None = None
    matmul_alone_flops_per_second: PositiveFloat | None = None
    matmul_source: str = ""
    matmul_runs_of: str = ""
    attention_kernel: AttentionKernel = "flash"
    attention: Mapping[AttentionKernel, tuple[PositiveFloat, PositiveFloat]] = {}
    attention_source: str = ""
    grouped_matmul: bool = False
    within: str
    pair: str | None = None
    across: str
    ranks_per_node: PositiveInt
    host_bytes_per_second: PositiveFloat
    ecc: bool = False

    @property
    def chip(self) -> Chip:
        shared_fields = self.model_dump(include=set(Chip.model_fields))
        return Chip(memory_bytes=self.memory_gib * 1024**3, **shared_fields)

    def has_name(self, key: str) -> bool:
        """Returns True if `key`, a `normalized_chip_name`, is a name, alias or device name of the chip."""
        return key in {normalized_chip_name(name) for name in (self.name, *self.aliases, *self.device_names)}


@cache
def read_catalog_chips() -> tuple[CatalogChip, ...]:
    """Reads all chips of `catalog.toml`."""
    entries = read_toml(Path(__file__).with_name("catalog.toml"))["chips"]
    return tuple(CatalogChip.parse(entry, source=f"catalog.toml, {entry['name']}") for entry in entries)


def find_chip_by_device_name(device_name: str, *, memory_bytes: int | None = None) -> Chip | None:
    """Returns the chip with torch's name `device_name`, or None if the catalog does not have it.

    Only whole names match: `NVIDIA H100 PCIe`, `NVIDIA H100 NVL` and `NVIDIA H100 80GB HBM3` (SXM) are three
    chips, and `NVIDIA A100-SXM4-40GB MIG 3g.20gb` is a slice of one.

    memory_bytes: the device's memory. If it differs from the chip's, the device is a partition that has the
        whole chip's name (AMD's), and the result is None.
    """
    name = " ".join(device_name.lower().split())
    for vendor in ("nvidia ", "amd ", "intel "):
        name = name.removeprefix(vendor)
    chip = next((entry.chip for entry in read_catalog_chips() if name in entry.device_names), None)
    if chip is None or memory_bytes is None:
        return chip
    return chip if 0.85 <= memory_bytes / chip.memory_bytes <= 1.05 else None


def find_catalog_entry_of_chip(chip: Chip) -> CatalogChip | None:
    """Returns the catalog entry of a chip that `find_chip_by_device_name` returned."""
    return next((entry for entry in read_catalog_chips() if entry.name == chip.name), None)


def normalized_chip_name(name: str) -> str:
    """Returns a chip's name without case, blanks, dashes and vendor: `NVIDIA H100-PCIe` -> `h100pcie`."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "amd", "intel", "geforce", "instinct"):
        key = key.removeprefix(word)
    return key


@cache
def read_catalog_links() -> Mapping[str, Mapping[str, Any]]:
    """Reads all links of `links.toml`, whose head explains each field, by name."""
    return read_toml(Path(__file__).with_name("links.toml"))


def link_from_catalog(name: str) -> Link:
    """Returns the link `name` of the catalog, with the rates of its collectives. Raises KeyError.

    An all-reduce is a reduce-scatter and an all-gather: a ring moves each byte twice, so it has half the rate
    and twice the hops. The catalog does not assume switches that reduce (NVLink SHARP), which are faster.
    """
    entry = read_catalog_links()[name]
    peak: float = entry["bytes_per_second"]

    def rate_of(figures: Mapping[str, Any], *, times: int = 1) -> CollectiveRate:
        return CollectiveRate(
            base_seconds=figures["base_seconds"],
            hop_seconds=times * figures["hop_seconds"],
            bytes_per_second=peak * figures["efficiency"] / times,
        )

    return Link(
        name=name,
        bytes_per_second=peak,
        source=entry["source"],
        all_gather=rate_of(entry),
        reduce_scatter=rate_of(entry),
        all_reduce=rate_of(entry, times=2),
        all_to_all=rate_of({**entry, **entry.get("all_to_all", {})}),
    )


# (seconds of a launch at the chip's peak rate, fraction of the sustained rate), sorted by seconds.
Shape = tuple[tuple[float, float], ...]


@cache
def read_default_rates() -> Mapping[str, Mapping[str, Any]]:
    """Reads the figures of all chips in `rates.toml`, whose comments explain each of them."""
    return read_toml(Path(__file__).with_name("rates.toml"))


def default_gpu_rates(chip: CatalogChip, attention_kernel: AttentionKernel) -> Rates:
    """Returns the rates of one GPU of this kind, estimated from its peaks and the curves in `rates.toml`.

        matmul rate(FLOP)  = sustained * curve(FLOP / peak FLOP/s)
        memory rate(bytes) = peak bytes/s * curve(bytes / peak bytes/s)
        grouped matmul     = matmul rate of large matrices * curve(FLOP of one matrix / peak FLOP/s)

    `chip.matmul_flops_per_second` is the sustained bf16 rate; other dtypes sustain the same fraction of their
    peaks, and fp8 a smaller one. `chip.attention` has the fractions of the matmul peak that each kernel of
    attention sustains with heads of 128; the curve is that of matmuls.
    """
    table = read_default_rates()
    of_matmul, host, known = table["matmul"], table["host"], chip.flops_per_second
    fitted, alone = chip.matmul_flops_per_second, chip.matmul_alone_flops_per_second
    if fitted is None and alone is not None:
        fitted = alone * of_matmul["in_steps"]
    sustained = of_matmul["sustained"] if fitted is None else fitted / known["bf16"]
    known_kernel = table["attention"][attention_kernel]
    usual = (known_kernel["forward"], known_kernel["backward"])
    forward, backward = chip.attention.get(attention_kernel, usual)

    def curves_by_dtype(part: float) -> dict[ComputeDtype, Curve]:
        return {dtype: _rate_curve(peak, of_matmul["curve"], part=part) for dtype, peak in known.items()}

    matmul = curves_by_dtype(sustained)
    if "fp8" in known:
        part = sustained * of_matmul["fp8"]
        matmul["fp8"] = _rate_curve(known["fp8"], of_matmul["curve"], part=part)
    memory = _rate_curve(chip.memory_bytes_per_second, table["memory"]["curve"])
    return Rates(
        matmul=matmul,
        single_rank_matmul=of_matmul["single_rank"],
        attention=curves_by_dtype(forward),
        attention_backward=curves_by_dtype(backward),
        attention_by_head_dim=known_kernel["forward_by_head_dim"],
        attention_backward_by_head_dim=known_kernel["backward_by_head_dim"],
        grouped_matmul=_grouped_matmul_parts(known["bf16"]) if chip.grouped_matmul else None,
        grouped_tile_rows=table["grouped_matmul"]["tile_rows"] if chip.grouped_matmul else 0.0,
        memory=memory,
        optimizer=memory,
        launch_seconds=host["launch_seconds"],
        unit_seconds=host["unit_seconds"],
        unaligned_matmul=of_matmul["unaligned"],
    )


def default_cpu_rates(cores: float) -> Rates:
    """Returns the rates of a CPU rank with `cores` cores, each with the rates per core in `rates.toml`."""
    cpu = read_default_rates()["cpu"]
    flops = (RatePoint(1.0e6, cpu["flops_per_second"] * cores),)
    memory = (RatePoint(1.0e4, cpu["bytes_per_second"] * cores),)
    return Rates(
        matmul={"fp32": flops},
        attention={"fp32": flops},
        attention_backward={"fp32": flops},
        memory=memory,
        optimizer=memory,
        launch_seconds=cpu["launch_seconds"],
        unit_seconds=cpu["unit_seconds"],
    )


def _rate_curve(peak: float, shape: Shape, *, part: float = 1.0) -> Curve:
    points = ((seconds * peak, peak * reached * part) for seconds, reached in shape)
    return tuple(RatePoint(_round_to_four_digits(size), _round_to_four_digits(rate)) for size, rate in points)


def _grouped_matmul_parts(peak: float) -> Curve:
    points = read_default_rates()["grouped_matmul"]["curve"]
    return tuple(RatePoint(_round_to_four_digits(seconds * peak), part) for seconds, part in points)


def _round_to_four_digits(figure: float) -> float:
    """Returns `figure` rounded to four significant digits, which is more than the sources have."""
    return float(f"{figure:.4g}")
