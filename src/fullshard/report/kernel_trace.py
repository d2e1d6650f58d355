"""Reads a profile of torch's profiler (Kineto's Chrome trace) into host operations and device kernels."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.system.files import open_regular_file

_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MOST_BYTES = 1 << 30  # of a file, decompressed


@dataclass(eq=False)
class HostOperation:
    """An operation, a range or a call of the driver, on one thread of the host.

    begin, end: microseconds
    dims: shapes of its tensors, by argument; types and values: those of its arguments, as text
    parent: the operation that called it; None if no operation did
    child_seconds: time in the operations that it called
    """

    name: str
    begin: float
    end: float
    thread: tuple[object, object]
    is_launch: bool = False
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
    """The operations of one profile. `device` is empty for a profile on the CPU."""

    host: list[HostOperation]
    device: list[DeviceWork]


def read_kernel_trace(path: Path) -> KernelTrace:
    """Reads a profile that `log.profile` wrote. Raises SpecError for any other file."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            packed = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = packed.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SpecError(
                f"{path} is too large to be read.", got="over 1 GiB", fix="fewer log.profile steps"
            )
        trace: Any = json.loads(data)
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror or str(error)) from error
    except (EOFError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not a profile.", got=str(error)) from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise SpecError(f"{path} is not a profile.", got="no traceEvents")
    return parse_kernel_trace(events)


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
                dims=_list(arguments.get("Input Dims")),
                types=_list(arguments.get("Input type")),
                values=_list(arguments.get("Concrete Inputs")),
            )
            host.append(made)
            if made.is_launch and "correlation" in arguments:
                launches[arguments["correlation"]] = made
    _find_parents(host)
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


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
