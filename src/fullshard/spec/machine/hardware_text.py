"""Parsing of texts that name hardware (`8xH100`, `32x8xH100`, `my.toml`), and of hardware.toml files."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.spec.machine.catalog import (
    CatalogChip,
    default_gpu_rates,
    find_catalog_entry_of_chip,
    link_from_catalog,
    normalized_chip_name,
    read_catalog_chips,
    read_catalog_links,
    read_default_rates,
)
from fullshard.spec.machine.hardware import CALIBRATE, AttentionKernel, Chip, Hardware, Link, Rates
from fullshard.system.small_files import read_toml

_COUNTS = re.compile(r"\s*(?:(\d{1,15})\s*[x×*]\s*)?(?:(\d{1,15})\s*[x×*]\s*)?(.+?)\s*", re.IGNORECASE)
_EXAMPLES = "8xH100, 32x8xH100 (32 nodes of 8), H200, or a hardware.toml"


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


def catalog_chip_hardware(entry: CatalogChip, *, attention_kernel: AttentionKernel | None = None) -> Hardware:
    """Returns hardware of one rank on a chip of the catalog, with the catalog's rates.

    attention_kernel: None: the one that torch 2.11 and newer prefer on this chip. Before 2.11, and with an
        older cuDNN, it was "flash" on every chip.
    """
    kernel = attention_kernel or entry.attention_kernel
    table = read_default_rates()
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
        workspace_bytes=memory["workspace_bytes"],
        fragmentation=memory["fragmentation"],
        usable_fraction=memory["ecc_fraction"] if entry.ecc else memory["usable_fraction"],
        host_bytes_per_second=entry.host_bytes_per_second * table["host"]["copy_efficiency"],
        source=f"catalog, not calibrated: {_rates_summary(entry, rates, kernel=kernel)}",
    )


def _rates_summary(entry: CatalogChip, rates: Rates, *, kernel: AttentionKernel) -> str:
    """Returns the rate of large matmuls with the time of the runs that it is fitted to, and the kernel."""
    matmul = f"large matmuls at {rates.matmul['bf16'][-1].rate / 1e12:,.0f} TFLOP/s in bf16"
    runs = entry.matmul_runs_of
    dated = (
        f"fitted to runs of {runs}: compare only with machines whose rates are of the same time"
        if runs
        else ""
    )
    return "; ".join(filter(None, (", ".join(filter(None, (matmul, dated))), f"attention by {kernel}")))


def _find_chip(name: str, text: str) -> CatalogChip:
    key, chips = normalized_chip_name(name), read_catalog_chips()
    found = next((chip for chip in chips if chip.has_name(key)), None)
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
    """Returns `hardware` with this layout. In nodes of two, a catalog link becomes that of pairs, if any."""
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
    known = catalog_chip_hardware(entry).model_dump()
    for side in ("within", "across"):
        if isinstance(data.get(side), str):
            data[side] = _link_in_hardware_file(data[side], path).model_dump()
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


def _link_in_hardware_file(name: str, path: Path) -> Link:
    links = read_catalog_links()
    if name not in links:
        raise SpecError(f"{path}: no link is called {name!r}.", fix=f"one of {', '.join(links)}")
    return link_from_catalog(name)
