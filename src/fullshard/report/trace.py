"""Traces of steps in the JSON format of Chrome's trace viewer, which https://ui.perfetto.dev opens."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.spec.step_spans import StepSpan

_PROGRAM = {"program": "fullshard"}
_SIGN = json.dumps({"otherData": _PROGRAM})[:-2].encode()  # how a trace of fullshard's begins
_NANOSECONDS = 1_000_000_000


def save_trace(
    path: Path, processes: Mapping[str, Sequence[StepSpan]], *, about: Mapping[str, str] | None = None
) -> None:
    """Writes a trace to `path`, compressed if its name ends in `.gz`. Raises OSError.

    processes: name of each process of the trace -> its spans; each of their tracks is a thread
    about: further facts, by name, for the trace's information page
    """
    events: list[dict[str, object]] = []
    for process, (name, spans) in enumerate(processes.items(), 1):
        events += _process_events(name, spans, process=process)
    trace = {"otherData": {**_PROGRAM, **(about or {})}, "displayTimeUnit": "ms", "traceEvents": events}
    text = json.dumps(trace, separators=(", ", ": ")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.name.endswith(".gz") else text)


def check_is_trace(path: Path) -> None:
    """Raises SpecError if `path` is not a trace that `save_trace` wrote."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            begins = file.read(len(_SIGN))
    except (EOFError, gzip.BadGzipFile):
        begins = b""
    if begins != _SIGN:
        raise SpecError(f"{path} is not a trace of fullshard's.")


def _process_events(name: str, spans: Sequence[StepSpan], *, process: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != "compute", track))
    # Perfetto shows the thread that has its process's number first.
    threads = {track: process + index for index, track in enumerate(tracks)}
    for track, thread in threads.items():
        at = {"pid": process, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": thread}}
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        # Both ends are rounded before they are subtracted: a viewer drops spans that overlap in part.
        begin, end = round(span.begin * _NANOSECONDS), round(span.end * _NANOSECONDS)
        name = span.name if span.unit is None else f"{span.name} ({span.unit})"
        event: dict[str, object] = {"ph": "X", "name": name, "cat": span.name}
        event |= {"pid": process, "tid": threads[span.track]}
        event |= {"ts": begin / 1000, "dur": (end - begin) / 1000}  # microseconds
        args = {"unit": span.unit, "microbatch": span.microbatch}
        yield event | {"args": {key: value for key, value in args.items() if value is not None}}
