"""The catalog of known accelerators and of the links between them, from `catalog.toml` and `links.toml`."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import Field

from fullshard.spec.machine.hardware import AttentionKernel, Chip, CollectiveRate, ComputeDtype, Link
from fullshard.spec.value import FrozenModel, NonNegativeFloat, PositiveFloat, PositiveInt
from fullshard.system.toml_file import read_toml


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


class AllToAllFigures(FrozenModel):
    """Figures of a link's all-to-all; those that are not known are as of an all-gather."""

    efficiency: float | None = Field(default=None, gt=0, le=1)
    base_seconds: NonNegativeFloat | None = None
    hop_seconds: NonNegativeFloat | None = None
    source: str = ""


class CatalogLink(FrozenModel):
    """A link in `links.toml`, whose head explains each field."""

    bytes_per_second: PositiveFloat
    efficiency: float = Field(gt=0, le=1)
    base_seconds: NonNegativeFloat
    hop_seconds: NonNegativeFloat
    all_to_all: AllToAllFigures = AllToAllFigures()
    source: str


@cache
def read_catalog_links() -> dict[str, CatalogLink]:
    """Reads all links of `links.toml`, by name."""
    entries = read_toml(Path(__file__).with_name("links.toml"))
    return {name: CatalogLink.parse(entry, source=f"links.toml, {name}") for name, entry in entries.items()}


def link_from_catalog(name: str) -> Link:
    """Returns the link `name` of the catalog, with the rates of its collectives. Raises KeyError.

    An all-reduce is a reduce-scatter and an all-gather: a ring moves each byte twice, so it has half the rate
    and twice the hops. The catalog does not assume switches that reduce (NVLink SHARP), which are faster.
    """
    entry = read_catalog_links()[name]
    rate = entry.bytes_per_second * entry.efficiency
    base, hop = entry.base_seconds, entry.hop_seconds
    once = CollectiveRate(base_seconds=base, hop_seconds=hop, bytes_per_second=rate)
    twice = CollectiveRate(base_seconds=base, hop_seconds=2 * hop, bytes_per_second=rate / 2)
    own = entry.all_to_all.model_dump(include={"base_seconds", "hop_seconds"}, exclude_none=True)
    if entry.all_to_all.efficiency is not None:
        own["bytes_per_second"] = entry.bytes_per_second * entry.all_to_all.efficiency
    exchange = once.model_copy(update=own)
    collectives = {"all_gather": once, "reduce_scatter": once, "all_reduce": twice, "all_to_all": exchange}
    return Link(name=name, bytes_per_second=entry.bytes_per_second, source=entry.source, **collectives)
