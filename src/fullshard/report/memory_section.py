"""Memory of each rank at the end of its last step, for the page about a run."""

from fullshard.quantities import format_bytes
from fullshard.report.markup import escape, table
from fullshard.report.run_record import RunRecord
from fullshard.spec.live_status import RankStatus

_MOST_ROWS = 16
_BYTES = {
    "allocated_bytes": "live",
    "peak_allocated_bytes": "peak of a step",
    "peak_reserved_bytes": "reserved",
    "host_bytes": "live, host",
    "resident_bytes": "resident, host",
}


def rank_memory_table(run: RunRecord) -> str:
    """Returns a table of the ranks' memory as live.json has it; "" if it has none.

    If there are many ranks, those with the most memory are shown.
    """
    ranks = [] if run.live is None else [one for one in run.live.ranks if one.memory]
    names = [name for name in _BYTES if any(name in one.memory for one in ranks)]
    if not names:
        return ""
    shown = sorted(ranks, key=lambda one: -one.memory.get(names[0], 0.0))[:_MOST_ROWS]
    has_device = "peak_allocated_bytes" in names
    header = ["rank", "host", *(_BYTES[name] for name in names), *(["fragmented", "retries"] * has_device)]
    rows = [_row(one, names, has_device=has_device) for one in sorted(shown, key=lambda one: one.rank)]
    note = "" if len(rows) == len(ranks) else f"<p class=dim>{len(rows)} of {len(ranks)} ranks."
    return f'<div class="scroll">{table(header, rows)}</div>{note}'


def _row(one: RankStatus, names: list[str], *, has_device: bool) -> list[str]:
    values = [one.memory.get(name) for name in names]
    row = [str(one.rank), escape(one.host), *("–" if v is None else format_bytes(v) for v in values)]
    if has_device:
        row += [f"{100 * one.memory.get('fragmentation', 0.0):.0f} %"]
        row += [f"{one.memory.get('allocator_retries', 0.0):,.0f}"]
    return row
