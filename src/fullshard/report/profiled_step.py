"""Reads a profile of torch's profiler (Kineto's Chrome trace), and divides the step in it into spans.

A span is the work that one stream of a rank did at a time, and for which unit.

[Note: what counts as what]
Ranges of the profile named `fullshard::<kind>` mark the parts of a step and the collectives that fullshard
makes, and `FSDP::<method> (<unit>)` marks FSDP2's work for a unit. Between the range that starts a unit's
forward or backward and the one that ends it, the unit computes. Each moment of the step has one kind of work.

CPU    Of the thread that trains, whether it works or waits: the innermost range. An all-reduce that has no
       range lasts from its call to the thread's next operation.
CUDA   Of the device: first its kernels of the model, then those of the optimizer, then those of FSDP2, then
       collectives, which are thus waiting only while no other kernel runs. A kernel is of the work in which
       the host launched it. A device without work waits for data, or else for launches.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from fullshard.errors import SpecError
from fullshard.spec.records.step_spans import COLLECTIVES, COMPUTE, RANGE_PREFIX, ProfiledStep, StepSpan
from fullshard.system.files import open_regular_file

ATTEMPT = "fullshard_attempt"
"""Name of the attempt among the metadata of a profile."""

ON_GPU = "fullshard_on_gpu"
"""Name of the mark that a rank has a GPU, among the metadata of a profile."""
ALL_REDUCE = "c10d::allreduce_"
"""Name of the operation of an all-reduce."""
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MOST_BYTES, _MOST_VALUES = 256 << 20, 16_000_000  # of a file, decompressed: about a million operations
_LARGEST_US = 1e17
STEP_RANGE = "fullshard::step"
"""Name of the range of the whole step."""
_PHASES, _OTHER_PARTS = ("forward", "backward"), ("data", "norm", "update")
_ENGINE, _CASTS = "FSDP::", "FSDP::cast_"  # activations that FSDP2 casts belong to the model
_ENGINE_RANGE = re.compile(r"FSDP::(?P<act>\w+)(?: \((?P<unit>.*)\)| for (?P<next>.*))?$")
_COPY, _OTHER, _ROOT = "copy", "other kernels", "(root)"
_NCCL = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
# On a device: which of several kinds of work at one moment counts; others are of the model.
_PRIORITIES = {"norm": 4, "update": 4, _COPY: 3, "data": 1}
_COMPUTING, _COMMUNICATING = 5, 2


@dataclass(eq=False)
class HostOperation:
    """An operation, a range or a call of the driver, on one thread of the host.

    begin, end: microseconds
    is_range: whether it is a named range of work, which only marks what it contains
    parent: the operation that called it; None if no operation did
    """

    name: str
    begin: float
    end: float
    thread: str
    is_launch: bool = False
    is_range: bool = False
    parent: "HostOperation | None" = None

    def iterate_self_and_callers(self) -> "Iterable[HostOperation]":
        """Yields this operation, the one that called it, and so on."""
        one: HostOperation | None = self
        while one is not None:
            yield one
            one = one.parent


@dataclass(frozen=True)
class DeviceWork:
    """A kernel, a copy or a fill on the device. `launch`: the host's call that launched it, if known."""

    name: str
    begin: float
    end: float
    launch: HostOperation | None


@dataclass(frozen=True)
class KernelTrace:
    """The operations of one profile.

    device: empty for a profile on the CPU
    base_ns: moment 0 of the operations, in ns since the epoch
    host_name, attempt: host of the rank, and number of the run's attempt
    is_on_gpu: whether the rank has a GPU
    """

    host: list[HostOperation]
    device: list[DeviceWork]
    base_ns: int = 0
    host_name: str = ""
    attempt: int = 1
    is_on_gpu: bool = False


def read_kernel_trace(path: Path) -> KernelTrace:
    """Reads the profile of a step. Raises SpecError for any other file."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            packed = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = packed.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SpecError(f"{path} is too large to be read.", got=f"over {_MOST_BYTES >> 20} MiB")
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror or str(error)) from error
    except (EOFError, zlib.error) as error:
        raise SpecError(f"{path} is not a profile.", got=str(error)) from error
    return parse_profile_json(data, name=str(path))


def parse_profile_json(data: bytes, *, name: str) -> KernelTrace:
    """Returns the operations of a profile in JSON. Raises SpecError for any other text. `name`: its file."""
    try:
        if (values := sum(map(data.count, (b",", b"{", b"[")))) > _MOST_VALUES:
            raise ValueError(f"about {values:,} values, at most {_MOST_VALUES:,}")
        trace: Any = json.loads(data)
        known = cast(Mapping[str, Any], trace) if isinstance(trace, dict) else {}
        base_ns, attempt = int(known.get("baseTimeNanoseconds", 0)), int(known.get(ATTEMPT, 1))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SpecError(f"{name} is not a profile.", got=str(error)) from error
    events = known.get("traceEvents")
    if not isinstance(events, list):
        raise SpecError(f"{name} is not a profile.", got="no traceEvents")
    found, host_name = parse_kernel_trace(cast(list[Any], events)), str(known.get("host_name", ""))
    on_gpu = bool(known.get(ON_GPU))
    return replace(found, base_ns=base_ns, host_name=host_name, attempt=attempt, is_on_gpu=on_gpu)


def parse_kernel_trace(events: Iterable[Any]) -> KernelTrace:
    """Returns the operations among the events of a Chrome trace. Events of other kinds are left out."""
    host: list[HostOperation] = []
    launches: dict[str, HostOperation] = {}
    device: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        begin, duration, kind = event.get("ts"), event.get("dur"), event.get("cat")
        if not isinstance(begin, int | float) or not isinstance(duration, int | float):
            continue
        if not (abs(begin) < _LARGEST_US and abs(duration) < _LARGEST_US):
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if kind in _DEVICE:
            device.append((event, arguments))
        elif kind in _HOST:
            made = HostOperation(
                str(event.get("name")),
                begin,
                begin + duration,
                f"{event.get('pid')} {event.get('tid')}",
                is_launch=kind in _LAUNCHES,
                is_range=kind == "user_annotation",
            )
            host.append(made)
            if made.is_launch and "correlation" in arguments:
                launches[str(arguments["correlation"])] = made
    _set_parents(host)
    if not device:
        _extend_all_reduces(host)
    works = [
        DeviceWork(
            str(event.get("name")),
            event["ts"],
            event["ts"] + event["dur"],
            launch=launches.get(str(arguments.get("correlation"))),
        )
        for event, arguments in device
    ]
    return KernelTrace(host, sorted(works, key=lambda one: one.begin))


def _set_parents(host: list[HostOperation]) -> None:
    """Sets the parents of the operations: on one thread, an operation is in the one that encloses it."""
    host.sort(key=lambda one: (one.thread, one.begin, -one.end))
    around: list[HostOperation] = []
    for one in host:
        while around and (around[-1].thread != one.thread or around[-1].end <= one.begin):
            around.pop()
        if around:
            one.parent = around[-1]
        if not one.name.startswith("gloo:"):  # another thread ends these ranges, so they enclose nothing
            around.append(one)


def _extend_all_reduces(host: list[HostOperation]) -> None:
    """Lets each all-reduce last to its thread's next operation, or to the end of the one around it.

    On the host, its own end is that of the call, and the caller waits afterwards.
    """
    for index, one in enumerate(host):
        if one.name == ALL_REDUCE and one.parent is not None:
            later = (each.begin for each in host[index + 1 :] if each.begin >= one.end)
            one.end = min(next(later, one.parent.end), one.parent.end)


class Work(NamedTuple):
    """Work from `begin` to `end` in µs. Of several at once, the highest priority counts, then the last."""

    begin: float
    end: float
    name: str
    unit: str | None = None
    priority: int = 0


def profiled_step(trace: KernelTrace, *, step: int, rank: int) -> ProfiledStep:
    """Returns the spans of a profiled step. Raises SpecError without a whole step, or its work on the GPU."""
    whole = next((one for one in trace.host if one.is_range and one.name == STEP_RANGE), None)
    if whole is None:
        raise SpecError("the profile is not of a step.", got=f"no range {STEP_RANGE}")
    if trace.is_on_gpu and not trace.device:
        why = "CUPTI gave none, because another profiler uses it, or the container may not"
        raise SpecError("the profile has no work of the GPU.", why=why)
    names = {RANGE_PREFIX + part: part for part in (*_PHASES, *_OTHER_PARTS)}
    parts = [
        Work(one.begin, one.end, names[one.name])
        for one in trace.host
        if one.thread == whole.thread and one.is_range and one.name in names
    ]
    if trace.device:
        end = max(whole.end, *(one.end for one in trace.device))
        compute, others = _device_works(trace, whole, parts=parts)
        spans = disjoint_works(compute, begin=whole.begin, end=end, idle="wait for launches")
    else:
        end = whole.end
        works = _host_works([one for one in trace.host if one.thread == whole.thread], parts=parts)
        spans = disjoint_works(works, begin=whole.begin, end=end, idle="host's work")
        waits = {wait: track for track, wait in COLLECTIVES.values()}
        others = [(waits[one.name], one) for one in works if one.name in waits]
    tracks = [(COMPUTE, one) for one in spans] + others + [("phases", one) for one in parts]
    forwards = [one.begin for one in parts if one.name == "forward"]
    made = (_step_span_of_work(track, one, start=whole.begin, forwards=forwards) for track, one in tracks)
    return ProfiledStep(
        step=step,
        attempt=trace.attempt,
        rank=rank,
        host=trace.host_name,
        begin_ns=trace.base_ns + round(whole.begin * 1000),
        spans=tuple(sorted(made, key=lambda span: (span.begin, -span.end))),
    )


def _host_works(host: Sequence[HostOperation], *, parts: Sequence[Work]) -> list[Work]:
    """Returns the named work of one thread, in which the innermost is that which began last."""
    works = [one for one in parts if one.name in _PHASES]  # also of a thread that computes for another one
    works += _unit_works(host, parts=parts)
    for one in host:
        name, unit = _work_name_and_unit(one)
        if name is not None:
            works.append(Work(one.begin, one.end, name, unit))
    return works


def _unit_works(host: Iterable[HostOperation], *, parts: Sequence[Work]) -> Iterator[Work]:
    """Yields the times between the ranges that start and that end a unit's forward or backward."""
    phases = [one for one in parts if one.name in _PHASES]
    begins = [one.begin for one in phases]
    running: dict[str | None, list[tuple[float, Work]]] = {}
    for one in host:
        found = _ENGINE_RANGE.match(one.name) if one.is_range else None
        if found is None:
            continue
        act, unit = found["act"], _unit_of(one)
        if act in ("pre_forward", "pre_backward") and (index := bisect_right(begins, one.begin)):
            running.setdefault(unit, []).append((one.end, phases[index - 1]))
        elif act.startswith(("post_forward", "post_backward")):
            for begin, phase in running.pop(unit, ()):
                yield Work(begin, min(one.begin, phase.end), phase.name, unit)
    # A unit whose inputs need no gradient ends its backward with the whole backward.
    for unit, left in running.items():
        for begin, phase in left:
            yield Work(begin, phase.end, phase.name, unit)


def _device_works(
    trace: KernelTrace, whole: HostOperation, *, parts: Sequence[Work]
) -> tuple[list[Work], list[tuple[str, Work]]]:
    """Returns the works that count for the compute track, and (track, work) of collectives."""
    compute = [one._replace(priority=_PRIORITIES["data"]) for one in parts if one.name == "data"]
    collectives: list[tuple[str, Work]] = []
    threads = {one.launch.thread for one in trace.device if one.launch is not None}
    timelines = {
        thread: disjoint_works(
            _host_works([one for one in trace.host if one.thread == thread], parts=parts),
            begin=whole.begin,
            end=whole.end,
            idle=_OTHER,
        )
        for thread in threads
    }
    begins = {thread: [one.begin for one in timeline] for thread, timeline in timelines.items()}
    for one in trace.device:
        launched = Work(one.begin, one.end, _OTHER)
        if one.launch is not None:
            thread = one.launch.thread
            launched = timelines[thread][max(0, bisect_right(begins[thread], one.launch.begin) - 1)]
        kind = _collective_kind(one)
        if kind is not None:
            track, wait = COLLECTIVES[kind]
            work = Work(one.begin, one.end, wait, launched.unit, _COMMUNICATING)
            collectives.append((track, work))
        else:
            name = _COPY if launched.name == "FSDP2" else launched.name
            name = _phase_at(parts, one) if name.startswith("wait for ") or name == _OTHER else name
            work = Work(one.begin, one.end, name, launched.unit, _PRIORITIES.get(name, _COMPUTING))
        compute.append(work)
    return compute, collectives


def _phase_at(parts: Sequence[Work], work: DeviceWork) -> str:
    at = work.begin if work.launch is None else work.launch.begin
    return next((one.name for one in parts if one.begin <= at < one.end and one.name in _PHASES), _OTHER)


def _collective_kind(work: DeviceWork) -> str | None:
    """Returns the key of `COLLECTIVES` for a kernel; None for a kernel that is not a collective."""
    if "nccl" not in work.name.lower():
        return None
    enclosing = () if work.launch is None else work.launch.iterate_self_and_callers()
    chain = [one.name for one in enclosing if one.is_range]
    own = [kind for name in reversed(chain) if (kind := name.removeprefix(RANGE_PREFIX)) in COLLECTIVES]
    named = [kind for part, kind in _NCCL.items() if part in work.name]
    # Names of generic kernels do not identify the collective.
    is_gather = any(name.startswith("FSDP::all_gather") for name in chain)
    is_engine = any(name.startswith(_ENGINE) for name in chain)
    return [*own, *named, "all_gather" if is_gather else "reduce_scatter" if is_engine else "all_reduce"][0]


def _work_name_and_unit(one: HostOperation) -> tuple[str | None, str | None]:
    """Returns the name of the work of a range, or of an all-reduce, and its unit; (None, None) for others."""
    if one.name == ALL_REDUCE and not _is_in_collective(one):
        return COLLECTIVES["all_reduce"][1], _unit_of(one)
    if not one.is_range or one.name.startswith(_CASTS):
        return None, None
    if one.name.startswith(_ENGINE):
        return (_COPY if "copy_out" in one.name else "FSDP2"), _unit_of(one)
    kind = one.name.removeprefix(RANGE_PREFIX)
    if kind == one.name:
        return None, None
    if kind in COLLECTIVES:
        return (None if _is_in_collective(one) else COLLECTIVES[kind][1]), _unit_of(one)
    return (kind if kind in _OTHER_PARTS else None), None


def _is_in_collective(one: HostOperation) -> bool:
    return any(
        each is not one and each.is_range and each.name.removeprefix(RANGE_PREFIX) in COLLECTIVES
        for each in one.iterate_self_and_callers()
    )


def _unit_of(one: HostOperation) -> str | None:
    """Returns the unit of FSDP2's innermost range around an operation; None outside of one."""
    for each in one.iterate_self_and_callers():
        found = _ENGINE_RANGE.match(each.name) if each.is_range else None
        if found is not None:
            return (found["unit"] or found["next"] or _ROOT).replace(", ", "+")
    return None


def disjoint_works(works: Iterable[Work], *, begin: float, end: float, idle: str) -> list[Work]:
    """Returns disjoint works that fill the time from `begin` to `end`. Gaps get a work of the name `idle`."""
    kept = [w._replace(begin=max(w.begin, begin), end=min(w.end, end)) for w in works if w.end > begin]
    kept = sorted((one for one in kept if one.begin < one.end), key=lambda one: one.begin)
    edges = sorted({begin, end, *(one.begin for one in kept), *(one.end for one in kept)})
    # (-priority, -index, work): the first counts, if it has not ended
    active: list[tuple[int, int, Work]] = []
    spans: list[Work] = []
    following = 0
    for at, until in pairwise(edges):
        while following < len(kept) and kept[following].begin <= at:
            heappush(active, (-kept[following].priority, -following, kept[following]))
            following += 1
        while active and active[0][2].end <= at:
            heappop(active)
        current = active[0][2] if active else Work(at, until, idle)
        last = spans[-1] if spans else None
        if last is not None and (last.name, last.unit) == (current.name, current.unit):
            spans[-1] = last._replace(end=until)
        else:
            spans.append(current._replace(begin=at, end=until))
    return spans


def _step_span_of_work(track: str, one: Work, *, start: float, forwards: Sequence[float]) -> StepSpan:
    name = one.name.removeprefix("wait for ") if track != COMPUTE else one.name
    microbatch = bisect_right(forwards, one.begin) if one.name in _PHASES or one.unit is not None else 0
    return StepSpan(
        track,
        name,
        (one.begin - start) * 1e-6,
        (one.end - start) * 1e-6,
        unit=one.unit,
        microbatch=microbatch or None,
    )
