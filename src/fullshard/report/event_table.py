"""The events of a run as an HTML table, and as signs below a chart."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, zip_longest

from fullshard.quantities import format_bytes, format_seconds
from fullshard.report.chart import Lane
from fullshard.report.markup import cell, escape, percent_text, table
from fullshard.report.run_record import RunRecord
from fullshard.report.verdict import fault_text
from fullshard.spec.event import RunEvent

_MOST_ROWS = 120
_LARGEST = 1e30
_HIDDEN = ("plan",)  # has a section of its own
_FAULTS = ("fault", "save_failed", "out_of_memory")
_LANES = {
    "save": "saved",
    "resume": "resumed",
    "skip": "not finite",
    "spike": "stood out",
    "rollback": "rolled back",
    "straggler": "held up",
    "leak": "leak",
    "fault": "fault",
}


def event_lanes(run: RunRecord) -> list[Lane]:
    """Returns the rows of signs for the events of the run whose step is known."""
    marks: dict[str, list[tuple[float, str]]] = {kind: [] for kind in _LANES}
    for event in run.of_kind("resume", "rollback", "fault", "skip", "spike", "straggler", "leak"):
        if event.step is not None:
            marks[event.event].append((event.step, f"step {event.step:,}: {describe_event(event)}"))
    marks["save"] = [(step, f"saved after step {step:,}") for step in run.saved_steps]
    if not run.events:
        marks["skip"] = [(step, f"step {step:,} was skipped") for step in run.metrics.skipped_steps()]
    labels = _LANES if run.events else _LANES | {"skip": "skipped"}
    return [Lane(kind, labels[kind], found) for kind, found in marks.items() if found]


def event_table(run: RunRecord) -> str:
    """Returns the table of events; an empty text if there are none. Events of a kind in a row share a row."""
    # A rollback has the figures of the step that it follows.
    events = [
        event
        for event, after in zip_longest(run.events, run.events[1:])
        if event.event not in _HIDDEN
        and not (event.event in ("skip", "spike") and after is not None and after.event == "rollback")
    ]
    if not events:
        return ""
    groups = [list(group) for _, group in groupby(events, key=_row_key)]
    left_out = max(0, len(groups) - _MOST_ROWS)
    kept = groups[: _MOST_ROWS // 4] + groups[len(groups) - _MOST_ROWS * 3 // 4 :] if left_out else groups
    rows = [_event_row(group) for group in kept]
    note = "" if not left_out else f"<p class=dim>{left_out:,} more rows are in events.jsonl."
    made = table(["time, UTC", "attempt", "step", "event"], rows, kind="text")
    return f'<div class="scroll">{made}</div>{note}'


def _row_key(event: RunEvent) -> tuple[object, ...]:
    """Returns a key that events of one row have in common: their kind, and the rank that a straggler is."""
    own = (event.details.get("rank"), event.details.get("cause")) if event.event == "straggler" else ()
    return (event.event, event.attempt, str(own))


def _event_row(group: Sequence[RunEvent]) -> list[str]:
    first, last = group[0], group[-1]
    steps = [event.step for event in group if event.step is not None]
    span = f"{steps[0]:,}" if steps else ""
    if len(set(steps)) > 1:
        span += f" … {steps[-1]:,}"
    text = (
        describe_event(last) if len(group) == 1 else f"{len(group)} times; the last: {describe_event(last)}"
    )
    shown = cell(escape(text), "bad" if first.event in _FAULTS else "")
    return [f"{first.at:%Y-%m-%d %H:%M:%S}", str(first.attempt), cell(span, "nowrap"), shown]


def describe_event(event: RunEvent) -> str:
    """Returns what happened, as one sentence without its step."""
    describe = _SENTENCES.get(event.event)
    if describe is not None:
        return describe(event, event.details)
    known = ", ".join(f"{key} {value}" for key, value in event.details.items())
    return f"{event.event}: {known}" if known else event.event


def _describe_start(event: RunEvent, details: Mapping[str, object]) -> str:
    return f"started on {details.get('ranks')} {details.get('device')} ranks ({details.get('process')})"


def _describe_save(event: RunEvent, details: Mapping[str, object]) -> str:
    seconds, stalled = _number(details.get("seconds")), _number(details.get("stalled_seconds"))
    took = "" if seconds is None else f" in {format_seconds(seconds)}"
    if stalled is not None and stalled != seconds:
        took += f", while training waited {format_seconds(stalled)}"
    return f"saved {details.get('path')}{took}"


def _describe_skip(event: RunEvent, details: Mapping[str, object]) -> str:
    loss, norm = (_figure(details.get(name)) for name in ("loss", "grad_norm"))
    why = "stood out" if event.event == "spike" else "was not finite"
    return f"left out, for it {why}: loss {loss}, gradient norm {norm}"


def _describe_rollback(event: RunEvent, details: Mapping[str, object]) -> str:
    loss, norm = (_figure(details.get(name)) for name in ("loss", "grad_norm"))
    return f"rolled back to step {details.get('to_step')}: loss {loss}, gradient norm {norm}"


def _describe_straggler(event: RunEvent, details: Mapping[str, object]) -> str:
    seconds, share = _number(details.get("seconds")), _number(details.get("share"))
    per_step = f", {format_seconds(seconds)} per step" if seconds and seconds > 0 else ""
    per_step += f" ({percent_text(share, 1.0)})" if per_step and share else ""
    since = f" from step {first:,}" if isinstance(first := details.get("from_step"), int) else ""
    return f"rank {details.get('rank')} held the others up{since}: {details.get('cause')}{per_step}"


def _describe_leak(event: RunEvent, details: Mapping[str, object]) -> str:
    growth = format_bytes(_number(details.get("bytes_per_step")) or 0)
    return f"rank {details.get('rank')} leaks {details.get('memory')}: {growth} per step"


def _describe_out_of_memory(event: RunEvent, details: Mapping[str, object]) -> str:
    held = format_bytes(_number(details.get("held_bytes")) or 0)
    where = f"in {details.get('phase')}, while it held {held} of tensors"
    return f"rank {details.get('rank')} ran out of memory {where}; see {details.get('path')}"


def _number(value: object) -> float | None:
    """Returns a number of a reasonable size, and None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _figure(value: object) -> str:
    number = _number(value)
    return "not finite" if number is None else f"{number:.4g}"


_SENTENCES: Mapping[str, Callable[[RunEvent, Mapping[str, object]], str]] = {
    "start": _describe_start,
    "resume": lambda event, details: f"resumed after this step, on {details.get('ranks')} ranks",
    "save": _describe_save,
    "save_failed": lambda event, details: f"NOT SAVED: {details.get('error')}",
    "skip": _describe_skip,
    "spike": _describe_skip,
    "rollback": _describe_rollback,
    "straggler": _describe_straggler,
    "straggler_over": lambda event, details: (
        f"rank {details.get('rank')} no longer did: {details.get('cause')}"
    ),
    "leak": _describe_leak,
    "allocator_retry": lambda event, details: (
        f"rank {details.get('rank')}'s allocator freed its cache, {details.get('count')} times in 20 steps"
    ),
    "out_of_memory": _describe_out_of_memory,
    "fault": lambda event, details: fault_text(event),
    "restart": lambda event, details: f"restart {details.get('count')} of {details.get('allowed')}",
    "signal": lambda event, details: f"the launcher received {details.get('signal')}",
    "stop": lambda event, details: f"stopped, {'and saved' if details.get('saved') else 'without a save'}",
    "end": lambda event, details: f"finished: loss {_figure(details.get('loss'))}",
}
