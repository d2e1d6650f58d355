"""The collectives of this rank that have not ended, from torch's flight recorder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fullshard.torch_private.groups import dump_flight_recorders


@dataclass(frozen=True)
class RecordedCollectives:
    """The collectives in a rank's flight recorder. Empty if this torch records none.

    last: the oldest unfinished one, or else the newest: `gloo:all_reduce 17 of default_pg [10] Double`
    unfinished: group -> its oldest collective that has not ended on the device
    started: groups whose such collective runs on the device; known with TORCH_NCCL_ENABLE_TIMING=1 alone
    records_device: whether collectives on a device are recorded, ended ones included
    """

    last: str = ""
    unfinished: Mapping[str, str] = field(default_factory=dict[str, str])
    started: Sequence[str] = ()
    records_device: bool = False


def read_recorded_collectives() -> RecordedCollectives:
    """Returns the collectives that torch has recorded in this process."""
    with suppress(RuntimeError, ValueError):
        return find_unfinished_collectives(
            entry for text in dump_flight_recorders() for entry in json.loads(text).get("entries", [])
        )
    return RecordedCollectives()


def find_unfinished_collectives(entries: Iterable[Mapping[str, Any]]) -> RecordedCollectives:
    """Returns the collectives that have not ended, of `entries` as torch's flight recorder dumps them.

    Hosts run ahead of their devices. A device waits in its oldest collective that has not ended.
    """
    ordered = sorted(entries, key=lambda entry: entry.get("time_created_ns", 0))
    pending = [one for one in ordered if not one.get("retired", True) and one.get("state") != "completed"]
    oldest: dict[str, Mapping[str, Any]] = {}
    for one in filter(_is_on_device, pending):
        oldest.setdefault("/".join(map(str, one.get("process_group", ()))), one)
    return RecordedCollectives(
        last=_collective_text(pending[0] if pending else ordered[-1]) if ordered else "",
        unfinished={group: _collective_text(one) for group, one in oldest.items()},
        started=[group for group, one in oldest.items() if one.get("state") == "started"],
        records_device=any(map(_is_on_device, ordered)),
    )


def _is_on_device(entry: Mapping[str, Any]) -> bool:
    return not str(entry.get("profiling_name")).startswith("gloo:")


def _collective_text(entry: Mapping[str, Any]) -> str:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group = "/".join(str(part) for part in entry.get("process_group", ())[1:])
    sizes = " ".join(str(size) for size in entry.get("input_sizes", ()))
    dtypes = " ".join(entry.get("input_dtypes", ()))
    return " ".join(f"{entry.get('profiling_name')} {number} of {group} {sizes} {dtypes}".split())
