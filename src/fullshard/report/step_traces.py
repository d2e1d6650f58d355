"""The profiled steps of a run, and traces of them for https://ui.perfetto.dev."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.quantities import leave_out_middle
from fullshard.report.profiled_step import profiled_step, read_kernel_trace
from fullshard.spec.records.run_files import METRICS, PROFILES
from fullshard.spec.records.step_spans import ProfiledStep, StepSpan
from fullshard.system.files import write_file_or_stream

_PROFILE = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")
_PROGRAM = {"program": "fullshard"}
_SIGN = json.dumps({"otherData": _PROGRAM})[:-2].encode()  # how a trace of fullshard's begins
_NANOSECONDS = 1_000_000_000


def list_profiles(directory: Path) -> dict[int, dict[int, Path]]:
    """Returns step -> rank -> its profile, for the run in `directory`, in order."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted((directory / PROFILES).glob("step-*-rank-*.json.gz")):
        if (name := _PROFILE.fullmatch(path.name)) is not None:
            found.setdefault(int(name[1]), {})[int(name[2])] = path
    return found


def read_step(directory: Path, step: int) -> list[ProfiledStep]:
    """Returns the spans of `step` on each rank whose profile can be read, in the order of ranks.

    Files of an earlier attempt, which had more ranks, are left out.
    """
    read: list[ProfiledStep] = []
    for rank, path in list_profiles(directory).get(step, {}).items():
        try:
            read.append(profiled_step(read_kernel_trace(path), step=step, rank=rank))
        except SpecError:
            continue
    last = max((one.attempt for one in read), default=0)
    return [one for one in read if one.attempt == last]


def check_step_or_choose_last(directory: Path, step: int | None) -> int:
    """Returns `step`, or if None, the last that the most ranks profiled. Raises SpecError if none was."""
    if not os.path.isdir(directory):  # which is also False for names that are too long
        raise SpecError(f"{directory} is not a directory.", fix="the directory of a run: runs/default")
    found = list_profiles(directory)
    if not found:
        known = (directory / METRICS).exists()
        raise SpecError(
            f"{directory} holds no profiled steps.",
            got=f"no {PROFILES}/step-*.json.gz" + ("" if known else f", and no {METRICS}"),
            why="a run profiles its tenth step, unless log.trace_every = 0" if known else None,
            fix="log.trace_every = 100"
            if known
            else "the directory that run.dir names, such as runs/default",
        )
    if step is None:
        most = max(len(ranks) for ranks in found.values())
        return max(one for one, ranks in found.items() if len(ranks) == most)
    if step not in found:
        raise SpecError(
            f"{directory} holds no profile of step {step}.",
            got=f"profiles of steps {', '.join(leave_out_middle([f'{one}' for one in found]))}",
            fix="one of these with --step, or the step in log.profile in the next run",
        )
    return step


def aligned_spans_by_trace_process(measured: Sequence[ProfiledStep]) -> dict[str, list[StepSpan]]:
    """Returns the processes of a trace: one for each rank, on a time axis that begins with the first."""
    start = min(one.begin_ns for one in measured)
    processes: dict[str, list[StepSpan]] = {}
    for one in measured:
        late = (one.begin_ns - start) * 1e-9
        processes[f"rank {one.rank} on {one.host}"] = [
            span._replace(begin=span.begin + late, end=span.end + late) for span in one.spans
        ]
    return processes


def save_trace(
    path: Path, processes: Mapping[str, Sequence[StepSpan]], *, about: Mapping[str, str] | None = None
) -> None:
    """Writes a trace in the format of Chrome's viewer, compressed if the name ends in `.gz`. Raises OSError.

    processes: name of each process of the trace -> its spans; each of their tracks is a thread
    about: further facts, by name, for the trace's information page
    """
    events: list[dict[str, object]] = []
    for process, (name, spans) in enumerate(processes.items(), 1):
        events += _trace_events(name, spans, process=process)
    trace = {"otherData": {**_PROGRAM, **(about or {})}, "displayTimeUnit": "ms", "traceEvents": events}
    text = json.dumps(trace, separators=(", ", ": ")).encode()
    write_file_or_stream(path, gzip.compress(text, mtime=0) if path.name.endswith(".gz") else text)


def check_is_trace(path: Path) -> None:
    """Raises SpecError if `path` is not a trace that `save_trace` wrote."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            begins = file.read(len(_SIGN))
    except (EOFError, gzip.BadGzipFile, zlib.error):
        begins = b""
    if begins != _SIGN:
        raise SpecError(f"{path} is not a trace of fullshard's.")


def _trace_events(name: str, spans: Sequence[StepSpan], *, process: int) -> Iterator[dict[str, object]]:
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
