"""Profiles as torch's profiler writes them, made by hand."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullshard.report.profiled_step import ATTEMPT, STEP_RANGE, KernelTrace, parse_profile_json, profiled_step
from fullshard.spec.records.run_files import PROFILES
from fullshard.spec.records.step_spans import ProfiledStep, StepSpan

HOST_THREAD, BACKWARD_THREAD = 1, 2


class MadeProfile:
    """A profile of a step, to which ranges, operations and kernels are added: times in µs."""

    def __init__(self, *, base_ns: int = 0, attempt: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self._launches, self._base_ns, self._attempt = 0, base_ns, attempt

    def host(
        self, name: str, begin: float, duration: float, *, thread: int = HOST_THREAD, **args: Any
    ) -> None:
        kind = "user_annotation" if name.startswith(("FSDP::", "fullshard::", "Optimizer")) else "cpu_op"
        self._add(kind, name, times=(begin, duration), thread=thread, args=args)

    def kernel(
        self, name: str, begin: float, duration: float, *, launched: float, thread: int = HOST_THREAD
    ) -> None:
        self._launches += 1
        same = {"correlation": self._launches}
        self._add("cuda_runtime", "cudaLaunchKernel", times=(launched, 1), thread=thread, args=same)
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self._add(kind, name, times=(begin, duration), thread=7, args=same)

    def text(self) -> bytes:
        made = {"host_name": "h", ATTEMPT: self._attempt, "baseTimeNanoseconds": self._base_ns}
        return json.dumps(made | {"traceEvents": [*self.events, {"ph": "M"}, "no event"]}).encode()

    def trace(self) -> KernelTrace:
        return parse_profile_json(self.text(), name="made")

    def measured(self) -> ProfiledStep:
        return profiled_step(self.trace(), step=1, rank=0)

    def write(self, directory: Path, *, step: int, rank: int) -> None:
        path = directory / PROFILES / f"step-{step:08}-rank-{rank:05}.json.gz"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(gzip.compress(self.text()))

    def _add(self, kind: str, name: str, *, times: tuple[float, float], thread: int, args: Any) -> None:
        event = {
            "ph": "X",
            "cat": kind,
            "name": name,
            "ts": times[0],
            "dur": times[1],
            "pid": 1,
            "tid": thread,
        }
        self.events.append(event | {"args": args})


def made_step(*ranges: tuple[str, float, float], end: float, **facts: int) -> MadeProfile:
    """A step from 0 to `end`, with ranges (name, begin, end)."""
    made = MadeProfile(**facts)
    for name, begin, until in ((STEP_RANGE, 0, end), *ranges):
        made.host(name, begin, until - begin)
    return made


def overlaps_in_part(spans: Iterable[StepSpan]) -> list[StepSpan]:
    """The spans that overlap another one of their track without nesting; Perfetto drops these."""
    tracks: dict[str, list[StepSpan]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    found: list[StepSpan] = []
    for each in tracks.values():
        open_ends: list[float] = []
        for span in sorted(each, key=lambda one: (one.begin, -one.end)):
            while open_ends and open_ends[-1] <= span.begin + 1e-12:
                open_ends.pop()
            if open_ends and span.end > open_ends[-1] + 1e-12:
                found.append(span)
            open_ends.append(span.end)
    return found
