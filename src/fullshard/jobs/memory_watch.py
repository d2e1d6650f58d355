"""Watches the memory of all ranks while a run trains: figures of each step, leaks, and allocator retries."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import has_backend, rank, world_size
from fullshard.jobs.run_log import RunLog
from fullshard.profiler.live_memory import LiveMemory, LiveMemoryMeter
from fullshard.quantities import format_bytes
from fullshard.survival.leaks import LeakDetector

WINDOW = 20
"""Steps between exchanges of the ranks' figures: few enough that a leak is named within 100 steps."""
_LEAKING = ("host_bytes", "allocated_bytes")
_PLACES = {"host_bytes": "host memory", "allocated_bytes": "device memory"}


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory at the end of a window. Figures that are not known are NaN. See `LiveMemory`.

    host_growth, allocated_growth: bytes by which `host_bytes` and `allocated_bytes` grow per step; 0 if they
        do not grow steadily
    host_free, allocated_free: bytes by which they may still grow
    """

    host_bytes: float
    resident_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    allocator_retries: float
    fragmentation: float
    host_growth: float
    allocated_growth: float
    host_free: float
    allocated_free: float

    @classmethod
    def of_figures(cls, figures: Sequence[float]) -> "RankMemory":
        return cls(*figures)

    def to_figures(self) -> list[float]:
        """Returns the figures in the order of the fields, for the other ranks."""
        return [getattr(self, one.name) for one in fields(self)]

    def known_figures(self) -> dict[str, float]:
        """Returns the known figures by name, without growth and free bytes."""
        own = {name: value for name, value in asdict(self).items() if not math.isnan(value)}
        return {name: value for name, value in own.items() if not name.endswith(("_growth", "_free"))}


class MemoryWatch(AbstractContextManager["MemoryWatch"]):
    """Reads the memory of this rank after each step, and compares the ranks after each WINDOW. Collective.

    The exchange runs beside the next step: no rank waits for it.

    steps: number of the run's last step
    """

    def __init__(self, device: torch.device, *, log: RunLog, steps: int) -> None:
        self._meter, self._log, self._steps = LiveMemoryMeter(device), log, steps
        self._detectors = {name: LeakDetector() for name in _LEAKING}
        self._gathering: tuple[int, list[torch.Tensor], dist.Work | None] | None = None
        self._has_peers = world_size() > 1 and has_backend("cpu")
        self._named: set[tuple[int, str]] = set()
        self._retries: dict[int, float] = {}

    def observe_step(self, step: int) -> dict[str, float]:
        """Returns the figures of this rank at the end of `step`, by name, for metrics.jsonl."""
        if self._gathering is not None:
            judged, figures, work = self._gathering
            self._gathering = None
            if work is not None:
                work.wait()
            self._judge([RankMemory.of_figures(one.tolist()) for one in figures], step=judged)
        own = self._meter.read()
        for name, detector in self._detectors.items():
            if (live := getattr(own, name)) is not None:
                detector.add_step(live)
        if step % WINDOW == 0:
            self._exchange(own, step=step)
        return own.known_figures()

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back to a checkpoint."""
        for detector in self._detectors.values():
            detector.forget()

    def __exit__(self, *error: object) -> None:
        self._meter.close()

    def _exchange(self, own: LiveMemory, *, step: int) -> None:
        free = self._meter.read_free_bytes()
        growths = {
            name: detector.growth_per_step(steps_left=self._steps - step, free_bytes=free.get(name))
            for name, detector in self._detectors.items()
        }
        window = RankMemory(
            **{name: math.nan if value is None else float(value) for name, value in asdict(own).items()},
            host_growth=growths["host_bytes"],
            allocated_growth=growths["allocated_bytes"],
            host_free=free.get("host_bytes", math.nan),
            allocated_free=free.get("allocated_bytes", math.nan),
        )
        figures = torch.tensor(window.to_figures(), dtype=torch.float64)
        if not self._has_peers:
            self._gathering = (step, [figures], None)
            return
        every = [torch.empty_like(figures) for _ in range(world_size())]
        work = dist.all_gather(every, figures, async_op=True)
        self._gathering = (step, every, work)

    def _judge(self, ranks: Sequence[RankMemory], *, step: int) -> None:
        """Records the figures of all ranks after `step`, or only of this rank without an exchange."""
        first = 0 if self._has_peers else rank()
        self._log.record_memory({first + index: one.known_figures() for index, one in enumerate(ranks)})
        for number, one in enumerate(ranks, start=first):
            host, device = (one.host_growth, one.host_free), (one.allocated_growth, one.allocated_free)
            self._report_leak(number, "host_bytes", growth_and_free=host, step=step)
            self._report_leak(number, "allocated_bytes", growth_and_free=device, step=step)
            before, now = self._retries.get(number, 0.0), one.allocator_retries
            if not math.isnan(now):
                self._retries[number] = now
            if now > before:
                details = {"rank": number, "count": int(now - before), "reserved_bytes": one.reserved_bytes}
                self._log.record_event("allocator_retry", step=step, details=details)

    def _report_leak(
        self, number: int, name: str, *, growth_and_free: tuple[float, float], step: int
    ) -> None:
        """Prints and records that a rank's memory grows; again only after the growth has stopped."""
        growth, free = growth_and_free
        if growth == 0.0:
            self._named.discard((number, name))
            return
        if (number, name) in self._named:
            return
        self._named.add((number, name))
        text = leak_text(number, name, growth=growth, free=free, steps_left=self._steps - step)
        self._log.print_message(f"step {step}: {text}")
        details = {"rank": number, "memory": _PLACES[name], "bytes_per_step": round(growth)}
        self._log.record_event("leak", step=step, details=details)


def leak_text(number: int, name: str, *, growth: float, free: float, steps_left: int) -> str:
    """Returns the message about a rank whose memory grows.

    growth, free: bytes per step, and bytes that are left (NaN: unknown)
    """
    text = f"{_PLACES[name]} of rank {number} grows by {format_bytes(round(growth))} per step"
    if growth * steps_left > free:
        text += f": the {format_bytes(round(free))} that are free last for {int(free / growth):,} steps"
    else:
        text += f": {format_bytes(round(growth * steps_left))} more by the last step"
    return f"{text}; something keeps tensors of each step"
