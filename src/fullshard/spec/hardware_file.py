"""hardware.toml: plain data as TOML for people to read and edit, with a unit beside each figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.spec.toml_file import read_toml, toml_text
from fullshard.system.files import write_whole

# The comment after each key, shared by all tables. `rates.matmul.bf16` is looked up by `matmul`.
_COMMENTS = {
    "nodes": "groups of ranks that `across` joins",
    "ranks_per_node": "ranks of a group, which `within` joins",
    "overlap": "part of a collective that can pass beside computing, 0 to 1",
    "contention": "how much longer computing takes beside a collective, as a part of it",
    "stragglers": "by which part the slowest of many ranks is behind",
    "context_bytes": "what a process takes of the device beside the allocator, bytes",
    "workspace_bytes": "what matmul libraries take of the allocator, bytes",
    "fragmentation": "what the allocator reserves over the peaks of its streams, as a part of them",
    "usable_fraction": "part of memory_bytes that a plan may take",
    "host_bytes_per_second": "device <-> host, one rank while all copy, bytes/s",
    "disk_bytes_per_second": "one rank while all read and write, both together, bytes/s",
    "host_memory_bytes": "one rank's share of the host's, bytes",
    "adam_per_second": "parameters that the host updates for one rank while all do, 1/s",
    "price_per_hour": "of one chip",
    "memory_bytes": "of one rank's device, bytes",
    "memory_bytes_per_second": "its peak, bytes/s",
    "flops_per_second": "peak of dense matmuls by dtype, FLOP/s",
    "matmul": "[FLOP of one launch, FLOP/s]",
    "attention": "[FLOP of one launch, FLOP/s]; of the pairs of positions that are computed",
    "attention_backward": "[FLOP of one launch, FLOP/s]",
    "memory": "elementwise: [bytes read and written by one launch, bytes/s]",
    "optimizer": "the fused update: [bytes read and written, bytes/s]",
    "launch_seconds": "host time of issuing one operation, s",
    "unit_seconds": "host time of one act of the engine on a unit, s",
    "watched_seconds": "more of it for a launch that selective recompute watches, s",
    "wait_seconds": "what ranks in the midst of a step wait for each other, s a collective",
    "step_seconds": "host time of a step outside of model and engine, s",
    "bytes_per_second": "bytes/s",
    "base_seconds": "of a collective, s",
    "hop_seconds": "for each rank beyond the first, s",
    "curve": "[bytes that a rank receives, bytes/s with the latency]; goes before the line",
    "curve_ranks": "over so many ranks",
}


def read_tables(path: Path) -> dict[str, Any]:
    """Returns the file's tables. Raises SpecError if it cannot be read or is not TOML."""
    return read_toml(path, fix="fullshard calibrate, which writes one")


def write_tables(path: Path, data: Mapping[str, Any], *, head: str) -> None:
    """Writes `data` atomically. Raises SpecError if it cannot be written."""
    text = toml_text(data, head=head, comment=lambda path: _COMMENTS.get(path[-1]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror) from error
