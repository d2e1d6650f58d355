"""Reads a profile of torch's profiler (Kineto's Chrome trace) into host operations and device kernels."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.system.files import open_regular_file

ATTEMPT = "fullshard_attempt"
"""Name of the attempt among the metadata of a profile."""

ALL_REDUCE = "c10d::allreduce_"
"""Name of the operation of an all-reduce."""
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MOST_BYTES = 1 << 30  # of a file, decompressed


@dataclass(eq=False)
class HostOperation:
    """An operation, a range or a call of the driver, on one thread of the host.

    begin, end: microseconds
    is_range: whether it is a named range of work, which only marks what it contains
    dims: shapes of its tensors, by argument; types and values: those of its arguments, as text
    parent: the operation that called it; None if no operation did
    child_seconds: time in the operations that it called
    """

    name: str
    begin: float
    end: float
    thread: tuple[object, object]
    is_launch: bool = False
    is_range: bool = False
    dims: list[Any] = field(default_factory=list[Any])
    types: list[str] = field(default_factory=list[str])
    values: list[str] = field(default_factory=list[str])
    parent: "HostOperation | None" = None
    child_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """Time in this operation, without that in the operations that it called."""
        return max(0.0, (self.end - self.begin) * 1e-6 - self.child_seconds)

    def chain(self) -> "Iterable[HostOperation]":
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
    is_copy: bool
    launch: HostOperation | None


@dataclass(frozen=True)
class KernelTrace:
    """The operations of one profile.

    device: empty for a profile on the CPU
    base_ns: moment 0 of the operations, in ns since the epoch
    host_name, attempt: host of the rank, and number of the run's attempt
    """

    host: list[HostOperation]
    device: list[DeviceWork]
    base_ns: int = 0
    host_name: str = ""
    attempt: int = 1


def read_kernel_trace(path: Path) -> KernelTrace:
    """Reads the profile of a step. Raises SpecError for any other file."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            packed = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = packed.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SpecError(f"{path} is too large to be read.", got="over 1 GiB")
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror or str(error)) from error
    except EOFError as error:
        raise SpecError(f"{path} is not a profile.", got=str(error)) from error
    return parse_profile(data, name=str(path))


def parse_profile(data: bytes, *, name: str) -> KernelTrace:
    """Returns the operations of a profile in JSON. Raises SpecError for any other text. `name`: its file."""
    try:
        trace: Any = json.loads(data)
        known = cast(Mapping[str, Any], trace) if isinstance(trace, dict) else {}
        base_ns, attempt = int(known.get("baseTimeNanoseconds", 0)), int(known.get(ATTEMPT, 1))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SpecError(f"{name} is not a profile.", got=str(error)) from error
    events = known.get("traceEvents")
    if not isinstance(events, list):
        raise SpecError(f"{name} is not a profile.", got="no traceEvents")
    found, host_name = parse_kernel_trace(cast(list[Any], events)), str(known.get("host_name", ""))
    return replace(found, base_ns=base_ns, host_name=host_name, attempt=attempt)


def parse_kernel_trace(events: Iterable[Any]) -> KernelTrace:
    """Returns the operations among the events of a Chrome trace. Events of other kinds are left out."""
    host: list[HostOperation] = []
    launches: dict[object, HostOperation] = {}
    device: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        begin, duration, kind = event.get("ts"), event.get("dur"), event.get("cat")
        if not isinstance(begin, int | float) or not isinstance(duration, int | float):
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
                (event.get("pid"), event.get("tid")),
                is_launch=kind in _LAUNCHES,
                is_range=kind == "user_annotation",
                dims=_list(arguments.get("Input Dims")),
                types=_list(arguments.get("Input type")),
                values=_list(arguments.get("Concrete Inputs")),
            )
            host.append(made)
            if made.is_launch and "correlation" in arguments:
                launches[arguments["correlation"]] = made
    _find_parents(host)
    if not device:
        _extend_all_reduces(host)
    works = [
        DeviceWork(
            str(event.get("name")),
            event["ts"],
            event["ts"] + event["dur"],
            is_copy=event.get("cat") != "kernel",
            launch=launches.get(arguments.get("correlation")),
        )
        for event, arguments in device
    ]
    return KernelTrace(host, sorted(works, key=lambda one: one.begin))


def _find_parents(host: list[HostOperation]) -> None:
    """Sets the parents of the operations: on one thread, an operation is in the one that encloses it."""
    host.sort(key=lambda one: (str(one.thread), one.begin, -one.end))
    around: list[HostOperation] = []
    for one in host:
        while around and (around[-1].thread != one.thread or around[-1].end <= one.begin):
            around.pop()
        if around:
            one.parent = around[-1]
            one.parent.child_seconds += (one.end - one.begin) * 1e-6
        around.append(one)


def _extend_all_reduces(host: list[HostOperation]) -> None:
    """Lets each all-reduce last to its thread's next operation, or to the end of the one around it.

    On the host, its own end is that of the call, and the caller waits afterwards.
    """
    for index, one in enumerate(host):
        if one.name == ALL_REDUCE and one.parent is not None:
            later = (each.begin for each in host[index + 1 :] if each.begin >= one.end)
            end = min(next(later, one.parent.end), one.parent.end)
            one.parent.child_seconds += (end - one.end) * 1e-6
            one.end = end


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
