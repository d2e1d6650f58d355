"""Profiles a step, and divides its seconds into the terms of `StepSeconds`.

[Note: what counts as what]
Profiler ranges named `fullshard::<kind>` (kinds: compute, model_parallel, all_gather, reduce_scatter,
optimizer, data) mark the parts of the step, and `FSDP::...` marks FSDP2's work. Every moment of the step is
assigned to one kind: the first in the order below among those active at that moment, or `other` if none is
active.

CPU    The activity of the calling thread, whether it works or waits. First the collectives (an all-reduce
       without a range lasts from its call to the thread's next operation), then the optimizer (which FSDP2
       may call in backward), FSDP2, data, and last the range of the microbatch, `compute`, which contains the
       others.
CUDA   The activity of the device. First kernels of the model, then those that the optimizer and FSDP2
       launched, then collectives, which thus count only while no other kernel runs: they are `exposed`. Time
       in which the device is idle counts as `data` while the host fetches data, otherwise as `other`.
"""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from fullshard.spec.measurement import StepSeconds
from fullshard.torch_private.profiler import profile_events

_STEP = "fullshard::step"
_RANGES = {
    "fullshard::compute": "compute",
    "fullshard::model_parallel": "model_parallel",
    "fullshard::all_gather": "exposed_all_gather",
    "fullshard::reduce_scatter": "exposed_reduce_scatter",
    "fullshard::all_reduce": "exposed_all_reduce",
    "fullshard::optimizer": "optimizer",
    "fullshard::data": "data",
}
# Activations that FSDP2 casts belong to the model.
_ENGINE, _ENGINE_CASTS = "FSDP::", "FSDP::cast_"
_ALL_REDUCE = "c10d::allreduce_"
_RUNTIME = ("cuda", "cuLaunch", "hip")  # driver calls, whose ids are numbered separately
_COLLECTIVES = ("exposed_all_gather", "exposed_reduce_scatter", "exposed_all_reduce")
_KERNELS = dict(zip(("AllGather", "ReduceScatter", "AllReduce"), _COLLECTIVES, strict=True))
HOST_ORDER = ("model_parallel", *_COLLECTIVES, "optimizer", "engine", "data", "compute")
DEVICE_ORDER = ("compute", "optimizer", "engine", "model_parallel", *_COLLECTIVES, "data")


class TraceEvent(NamedTuple):
    """An operation, a kernel or a range of a profile. `start` and `end` are in ns."""

    name: str
    start: int
    end: int
    thread: int = 0  # of a host event
    id: int = 0  # correlation id
    launched_by: int = 0  # for a kernel, the `id` of the host event that launched it
    on_device: bool = False


class KindInterval(NamedTuple):
    """An interval of one kind, from `start` to `end` in ns."""

    kind: str
    start: int
    end: int


@dataclass
class ProfiledStep:
    """Result of `profile_step`, which sets it when its context ends."""

    seconds: StepSeconds | None = None


@contextmanager
def profile_step(device: torch.device) -> Generator[ProfiledStep]:
    """Profiles the context's block, which runs one step. Yields the result. Profiling slows the step down."""
    traced = ProfiledStep()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as in `profiler.memory`: it prints otherwise
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)  # work left running by the previous step is not counted
    with (
        profile(use_cpu=True, use_kineto=True, use_device="cuda" if on_cuda else None) as profiler,
        record_function(_STEP),
    ):
        yield traced
    assert profiler is not None, "it is enabled"
    traced.seconds = step_seconds_by_term(_read_profiler_events(profiler))


def step_seconds_by_term(events: Sequence[TraceEvent]) -> StepSeconds:
    """Returns the seconds of the step recorded in `events`, by term. See [Note: what counts as what]."""
    step = next(event for event in events if event.name == _STEP and not event.on_device)
    device = [event for event in events if event.on_device]
    if not device:
        own = [event for event in events if event.thread == step.thread]
        nanoseconds = divide_time_among_kinds(host_intervals(own), HOST_ORDER, start=step.start, end=step.end)
    else:
        spans = [*device_intervals(events), *(s for s in host_intervals(events) if s.kind == "data")]
        end = max(step.end, *(event.end for event in device))
        nanoseconds = divide_time_among_kinds(spans, DEVICE_ORDER, start=step.start, end=end)
    return StepSeconds(**{kind: count * 1e-9 for kind, count in nanoseconds.items()})


def divide_time_among_kinds(
    spans: Iterable[KindInterval], order: Sequence[str], *, start: int, end: int
) -> dict[str, int]:
    """Returns kind -> ns. Each moment of [start, end] counts for the first kind in `order` that is active.

    A kind is active during its spans. `other` has the moments without any span. The sum is end - start.
    """
    place = {kind: index for index, kind in enumerate(order)}
    edges: list[tuple[int, int, int]] = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            edges += [(first, 1, place[span.kind]), (last, -1, place[span.kind])]
    edges.sort()
    active, own = [0] * len(order), [0] * (len(order) + 1)
    now = start
    for moment, change, index in edges:
        if moment > now:
            own[next((i for i, count in enumerate(active) if count), len(order))] += moment - now
            now = moment
        active[index] += change
    own[-1] += end - now
    return dict(zip([*order, "other"], own, strict=True))


def host_intervals(events: Iterable[TraceEvent]) -> list[KindInterval]:
    """Returns the spans of the host's ranges and all-reduces. An all-reduce lasts until the next event."""
    spans: list[KindInterval] = []
    waiting: TraceEvent | None = None  # an all-reduce
    around: list[TraceEvent] = []  # ranges that are open
    host = (event for event in events if not event.on_device)
    for event in sorted(host, key=lambda one: (one.thread, one.start, -one.end)):
        if waiting is not None and (event.thread != waiting.thread or event.start >= waiting.end):
            spans.append(_make_all_reduce_interval(waiting, around, before=event))
            waiting = None
        while around and (around[-1].thread != event.thread or around[-1].end <= event.start):
            around.pop()
        if event.name == _ALL_REDUCE:
            waiting = event
        kind = _kind_of_range(event.name)
        if kind is not None:
            spans.append(KindInterval(kind, event.start, event.end))
        if kind is not None or event.name == _STEP:
            around.append(event)
    if waiting is not None:
        spans.append(_make_all_reduce_interval(waiting, around, before=None))
    return spans


def _make_all_reduce_interval(
    call: TraceEvent, around: Sequence[TraceEvent], *, before: TraceEvent | None
) -> KindInterval:
    """Returns the span from an all-reduce's call to its thread's next event, within the range around it."""
    ends = [event.end for event in around if event.thread == call.thread and event.end >= call.end]
    if before is not None and before.thread == call.thread:
        ends.append(before.start)
    return KindInterval("exposed_all_reduce", call.start, min(ends, default=call.end))


def _kind_of_range(name: str) -> str | None:
    if name.startswith(_ENGINE):
        return None if name.startswith(_ENGINE_CASTS) else "engine"
    return _RANGES.get(name)


def device_intervals(events: Sequence[TraceEvent]) -> list[KindInterval]:
    """Returns a span per kernel and copy of the device. Its kind is that of its name or launching range."""
    ranges = _innermost_range_by_event_id(event for event in events if not event.on_device)
    ranges.pop(0, None)  # `launched_by` is 0 if it is unknown
    return [
        KindInterval(_kind_of_kernel(event.name, ranges.get(event.launched_by, "")), event.start, event.end)
        for event in events
        if event.on_device
    ]


def _kind_of_kernel(name: str, inside: str) -> str:
    """Returns the kind of a kernel. `inside`: name of the innermost range that launched it, or empty."""
    if "nccl" in name.lower():
        if _RANGES.get(inside) == "model_parallel":
            return "model_parallel"
        named = next((kind for part, kind in _KERNELS.items() if part in name), None)
        if named is not None:
            return named
        # Names of generic kernels do not identify the collective.
        if inside.startswith("FSDP::all_gather"):
            return "exposed_all_gather"
        return "exposed_reduce_scatter" if inside.startswith(_ENGINE) else "exposed_all_reduce"
    kind = _kind_of_range(inside)
    return kind if kind in ("engine", "optimizer") else "compute"


def _innermost_range_by_event_id(events: Iterable[TraceEvent]) -> dict[int, str]:
    """Returns id of a host event -> name of the innermost range around it (itself, if it is a range)."""
    found: dict[int, str] = {}
    around: list[TraceEvent] = []
    for event in sorted(events, key=lambda one: (one.thread, one.start, -one.end)):
        while around and (around[-1].thread != event.thread or around[-1].end <= event.start):
            around.pop()
        if event.name in _RANGES or event.name.startswith(_ENGINE):
            around.append(event)
        found[event.id] = around[-1].name if around else ""
    return found


def _read_profiler_events(profiler: profile) -> list[TraceEvent]:
    """Returns the profiler's events, except asynchronous ones, driver calls, and device copies of ranges."""
    events: list[TraceEvent] = []
    for one in profile_events(profiler):
        on_device = one.device_type() != torch.autograd.DeviceType.CPU
        if one.is_user_annotation() if on_device else one.is_async() or one.name().startswith(_RUNTIME):
            continue
        events.append(
            TraceEvent(
                one.name(),
                one.start_ns(),
                one.start_ns() + one.duration_ns(),
                thread=one.start_thread_id(),
                id=one.correlation_id(),
                launched_by=one.linked_correlation_id(),
                on_device=on_device,
            )
        )
    return events
