"""The catalog of known accelerators and links, the rates that follow from it, and hardware by name.

The figures are in `catalog.toml`, `links.toml` and `rates.toml`. `hardware_on` reads `8xH100`, `my.toml`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.spec.machine.hardware import (
    CALIBRATE,
    AttentionKernel,
    Chip,
    CollectiveRate,
    ComputeDtype,
    Curve,
    Hardware,
    Link,
    RatePoint,
    Rates,
)
from fullshard.spec.value import FrozenModel, PositiveFloat, PositiveInt
from fullshard.system.small_files import read_toml

_COUNTS = re.compile(r"\s*(?:(\d{1,15})\s*[x×*]\s*)?(?:(\d{1,15})\s*[x×*]\s*)?(.+?)\s*", re.IGNORECASE)
_EXAMPLES = "8xH100, 32x8xH100 (32 nodes of 8), H200, or a hardware.toml"


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


@cache
def read_machine_tables(name: str) -> Mapping[str, Any]:
    """Reads `<name>.toml` of this package, whose comments explain each figure: catalog, links, …"""
    return read_toml(Path(__file__).with_name(f"{name}.toml"))


@cache
def read_catalog_chips() -> tuple[CatalogChip, ...]:
    """Reads all chips of `catalog.toml`."""
    entries = read_machine_tables("catalog")["chips"]
    return tuple(CatalogChip.parse(entry, source=f"catalog.toml, {entry['name']}") for entry in entries)


def find_chip_by_device_name(device_name: str, *, memory_bytes: int | None = None) -> Chip | None:
    """Returns the chip with torch's name `device_name`, or None if the catalog does not have it.

    Only whole names match: `NVIDIA H100 PCIe`, `NVIDIA H100 NVL` and `NVIDIA H100 80GB HBM3` (SXM) are three
    chips, and `NVIDIA A100-SXM4-40GB MIG 3g.20gb` is a slice of one.

    memory_bytes: the device's memory. If it is not 0.85 to 1.05 times the chip's, the device is a partition
        that has the whole chip's name (AMD's), and the result is None.
    """
    name = " ".join(device_name.lower().split())
    for vendor in ("nvidia ", "amd ", "intel "):
        name = name.removeprefix(vendor)
    chip = next((entry.chip for entry in read_catalog_chips() if name in entry.device_names), None)
    if chip is None or memory_bytes is None:
        return chip
    return chip if 0.85 <= memory_bytes / chip.memory_bytes <= 1.05 else None


def find_catalog_entry_of_chip(chip: Chip) -> CatalogChip | None:
    """Returns the catalog entry with the name of `chip`; None if the catalog does not have it."""
    return next((entry for entry in read_catalog_chips() if entry.name == chip.name), None)


def normalized_chip_name(name: str) -> str:
    """Returns a chip name without case, blanks, dashes, vendor or brand: `NVIDIA H100-PCIe` -> `h100pcie`."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "amd", "intel", "geforce", "instinct"):
        key = key.removeprefix(word)
    return key


def link_from_catalog(name: str) -> Link:
    """Returns the link `name` of the catalog, with its collectives' rates. Raises KeyError for another name.

    An all-reduce is a reduce-scatter and an all-gather: a ring moves each byte twice, so it has half the rate
    and twice the hops. The catalog does not assume switches that reduce (NVLink SHARP), which are faster.
    """
    entry = read_machine_tables("links")[name]
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


def default_gpu_rates(chip: CatalogChip, attention_kernel: AttentionKernel) -> Rates:
    """Returns the rates of one GPU of this kind, estimated from its peaks and the curves in `rates.toml`.

        matmul rate(FLOP)  = sustained * curve(FLOP / peak FLOP/s)
        memory rate(bytes) = peak bytes/s * curve(bytes / peak bytes/s)
        grouped matmul     = matmul rate of large matrices * curve(FLOP of one matrix / peak FLOP/s)

    `chip.matmul_flops_per_second` is the sustained bf16 rate; other dtypes sustain the same fraction of their
    peaks, and fp8 a smaller one. `chip.attention` has the fractions of the matmul peak that each kernel of
    attention sustains with heads of 128; the curve is that of matmuls. `rates.toml` has the fractions for
    chips without these figures.
    """
    table = read_machine_tables("rates")
    of_matmul, host, known = table["matmul"], table["host"], chip.flops_per_second
    fitted, alone = chip.matmul_flops_per_second, chip.matmul_alone_flops_per_second
    if fitted is None and alone is not None:
        fitted = alone * of_matmul["in_steps"]
    sustained = of_matmul["sustained"] if fitted is None else fitted / known["bf16"]
    family: AttentionKernel = "flash" if attention_kernel == "flash" else "cudnn"
    known_kernel, flash = table["attention"][family], table["attention"]["flash"]
    forward, backward = _attention_parts(chip, family)
    flash_forward, flash_backward = _attention_parts(chip, "flash")

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
        flash_by_head_dim=_scaled_curve(flash["forward_by_head_dim"], flash_forward / forward),
        flash_backward_by_head_dim=_scaled_curve(flash["backward_by_head_dim"], flash_backward / backward),
        grouped_matmul=_grouped_matmul_efficiency_curve(known["bf16"]) if chip.grouped_matmul else None,
        grouped_tile_rows=table["grouped_matmul"]["tile_rows"] if chip.grouped_matmul else 0.0,
        memory=memory,
        optimizer=memory,
        launch_seconds=host["launch_seconds"],
        unit_seconds=host["unit_seconds"],
        unaligned_matmul=of_matmul["unaligned"],
    )


def default_cpu_rates(cores: float) -> Rates:
    """Returns the rates of a CPU rank with `cores` cores, each with the rates per core in `rates.toml`."""
    cpu = read_machine_tables("rates")["cpu"]
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
    return tuple(RatePoint(round_to_four_digits(size), round_to_four_digits(rate)) for size, rate in points)


def _grouped_matmul_efficiency_curve(peak: float) -> Curve:
    points = read_machine_tables("rates")["grouped_matmul"]["curve"]
    return tuple(RatePoint(round_to_four_digits(seconds * peak), part) for seconds, part in points)


def round_to_four_digits(figure: float) -> float:
    """Returns `figure` rounded to four significant digits, which is more than sources and clocks have."""
    return float(f"{figure:.4g}")


def hardware_on(text: str) -> Hardware:
    """Returns the hardware that `text` names, e.g. for `--on`.

        H200              one chip
        8xMI300X          eight chips; more chips than fit into a node are placed on several nodes
        2x8xA100-80GB     two nodes of eight chips
        my.toml           the hardware in the file; `4x8xmy.toml`: four nodes of eight of the file's chip

    Case, blanks and dashes are ignored; `H100` and `A100` are the SXM variants, the latter with 80 GB.
    Uncalibrated chips get rates from the catalog. A file may leave out the figures in the catalog: `chip =
    "H100"` is enough, and a `[chip]` of its own with `name`, `memory_bytes`, `memory_bytes_per_second` and
    `flops_per_second` gets rates and links like any other chip (`within = "nvlink4"`).

    Raises SpecError for an unknown chip or file, or a count that does not fill its nodes.

    >>> fs.hardware_on("2x8xH100").world_size
    16
    """
    match = _COUNTS.fullmatch(text)
    if match is None:
        raise SpecError("no hardware is named.", got=repr(text), fix=_EXAMPLES)
    first, second, name = match.groups()
    counts = [int(count) for count in (first, second) if count is not None]
    if 0 in counts:
        raise SpecError("there is no hardware with 0 of anything.", got=text, fix=_EXAMPLES)
    is_file = name.lower().endswith(".toml")
    hardware = _read_hardware_file(Path(name)) if is_file else catalog_chip_hardware(_find_chip(name, text))
    if not counts:
        return hardware
    layout = counts if len(counts) == 2 else _split_chips_into_nodes(counts[0], hardware, text=text)
    return _hardware_with_layout(hardware, nodes=layout[0], ranks_per_node=layout[1])


def _attention_parts(chip: CatalogChip, kernel: AttentionKernel) -> tuple[float, float]:
    """Returns the parts of the peak that a kernel of attention sustains, in forward and in backward."""
    usual = read_machine_tables("rates")["attention"][kernel]
    return chip.attention.get(kernel, (usual["forward"], usual["backward"]))


def _scaled_curve(points: Iterable[tuple[float, float]], factor: float) -> Curve:
    return tuple(RatePoint(size, factor * rate) for size, rate in points)


def catalog_chip_hardware(entry: CatalogChip, *, attention_kernel: AttentionKernel | None = None) -> Hardware:
    """Returns hardware of one rank on a chip of the catalog, with the catalog's rates.

    attention_kernel: None: the one that torch prefers on this chip; with an older cuDNN, it is "flash"
    """
    kernel = attention_kernel or entry.attention_kernel
    table = read_machine_tables("rates")
    memory = table["memory_use"]
    rates = default_gpu_rates(entry, kernel)
    return Hardware(
        name=entry.name,
        device="cuda",  # any device with its own memory
        chip=entry.chip,
        attention_kernel=kernel,
        rates=rates,
        within=link_from_catalog(entry.within),
        across=link_from_catalog(entry.across),
        contention=table["overlap"]["contention"],
        context_bytes=memory["context_bytes"],
        communicator_bytes=memory["communicator_bytes"],
        peer_bytes=memory["peer_bytes"],
        workspace_bytes=memory["workspace_bytes"],
        fragmentation=memory["fragmentation"],
        usable_fraction=memory["ecc_fraction"] if entry.ecc else memory["usable_fraction"],
        host_bytes_per_second=entry.host_bytes_per_second * table["host"]["copy_efficiency"],
        source=f"catalog, not calibrated: {_rates_summary(entry, rates, kernel=kernel)}",
    )


def _rates_summary(entry: CatalogChip, rates: Rates, *, kernel: AttentionKernel) -> str:
    """Returns the rate of large matmuls with the time of the runs that it is fitted to, and the kernel."""
    matmul = f"large matmuls at {rates.matmul['bf16'][-1].rate / 1e12:,.0f} TFLOP/s in bf16"
    if runs := entry.matmul_runs_of:
        matmul += f", fitted to runs of {runs}: compare only with machines whose rates are of the same time"
    return f"{matmul}; attention by {kernel.removesuffix('_256')}"


def _find_chip(name: str, text: str) -> CatalogChip:
    key, chips = normalized_chip_name(name), read_catalog_chips()
    named = ((chip, (chip.name, *chip.aliases, *chip.device_names)) for chip in chips)
    found = next((chip for chip, names in named if key in map(normalized_chip_name, names)), None)
    if found is not None:
        return found
    known = {normalized_chip_name(alias): chip.name for chip in chips for alias in (chip.name, *chip.aliases)}
    near = dict.fromkeys(known[one] for one in difflib.get_close_matches(key, known, n=3, cutoff=0.5))
    raise SpecError(
        f"{name!r} is not a chip of the catalog.",
        got=text,
        fix=f"{' or '.join(near)}, or a hardware.toml" if near else _EXAMPLES,
    )


def _split_chips_into_nodes(count: int, hardware: Hardware, *, text: str) -> tuple[int, int]:
    """Returns (nodes, ranks per node) for `count` chips. Raises SpecError if they do not fill the nodes."""
    size = (find_catalog_entry_of_chip(hardware.chip) or hardware).ranks_per_node
    if count <= size:
        return 1, count
    if count % size:
        below, above = count // size * size, (count // size + 1) * size
        raise SpecError(
            f"{count} of {hardware.chip.name} do not fill nodes of {size}.",
            got=text,
            fix=f"{below} or {above} of them, or the layout itself: NODES x RANKS x CHIP",
        )
    return count // size, size


def _hardware_with_layout(hardware: Hardware, *, nodes: int, ranks_per_node: int) -> Hardware:
    """Returns `hardware` with this layout. Two ranks per node get the catalog's link of pairs, if any."""
    entry = find_catalog_entry_of_chip(hardware.chip)
    laid_out = hardware.with_rank_counts(nodes=nodes, ranks_per_node=ranks_per_node)
    if entry and entry.pair and ranks_per_node == 2 and hardware.within == link_from_catalog(entry.within):
        return laid_out.model_copy(update={"within": link_from_catalog(entry.pair)})
    return laid_out


def _read_hardware_file(path: Path) -> Hardware:
    """Reads a hardware.toml, and adds its missing figures from the catalog."""
    data = read_toml(path, fix=CALIBRATE)
    if "rates" in data and isinstance(data.get("chip"), Mapping) and isinstance(data.get("within"), Mapping):
        return Hardware.parse(data, source=str(path))
    entry = _chip_in_hardware_file(data.get("chip"), path)
    known, links = catalog_chip_hardware(entry).model_dump(), read_machine_tables("links")
    for side in ("within", "across"):
        if isinstance(name := data.get(side), str):
            if name not in links:
                raise SpecError(f"{path}: no link is called {name!r}.", fix=f"one of {', '.join(links)}")
            data[side] = link_from_catalog(name).model_dump()
    return Hardware.parse({**known, **data, "chip": known["chip"]}, source=str(path))


def _chip_in_hardware_file(chip: Any, path: Path) -> CatalogChip:
    if isinstance(chip, str):
        return _find_chip(chip, f'chip = "{chip}" in {path}')
    if not isinstance(chip, Mapping):
        raise SpecError(f"{path}: chip is missing.", fix='chip = "H100", or a table [chip] with its peaks')
    own = {"device_names": (), "source": str(path), **chip}
    whole = Chip.parse(own, source=f"{path}, [chip]")
    if "bf16" not in whole.flops_per_second:
        raise SpecError(f"{path}: the chip's bf16 peak is missing.", fix="flops_per_second.bf16")
    known = whole.model_dump(exclude={"memory_bytes"}) | {"memory_gib": whole.memory_bytes / 1024**3}
    unfitted = dict.fromkeys(("matmul_flops_per_second", "matmul_alone_flops_per_second"))
    unknown = {"aliases": (), "attention_kernel": "flash", "attention": {}, **unfitted}
    return read_catalog_chips()[0].model_copy(update=known | unknown)
