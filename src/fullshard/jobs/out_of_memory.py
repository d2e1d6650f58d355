"""Reports of a rank that runs out of memory: `<run.dir>/out-of-memory/step-<step>-rank-<rank>.txt`."""

import errno
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from fullshard.errors import TrainError
from fullshard.jobs.event_log import count_attempts
from fullshard.profiler.live_memory import LiveMemoryMeter
from fullshard.profiler.memory import storage_bytes_by_part
from fullshard.sharding.mesh import RankInfo
from fullshard.spec.event import RunEvent
from fullshard.spec.out_of_memory import OutOfMemoryReport
from fullshard.spec.plan import Plan
from fullshard.spec.run_files import EVENTS, OUT_OF_MEMORY
from fullshard.survival.phase import PhaseTracker
from fullshard.system.error_location import error_location_text
from fullshard.torch_private.profiler import dump_memory_snapshot, record_memory_history

# Parts of the messages of torch's allocators, of C++, of drivers and of cuBLAS.
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB)?")
_FACTORS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_RESERVE_BYTES = 16 << 20  # freed before the report is made; never written to, so it is not resident memory
_MOST_HISTORY = 100_000


class OutOfMemoryReporter:
    """Context that writes a report if an allocation in its block fails, and raises a TrainError.

    The caller sets the fields as soon as it has them:

    directory: the run's directory; nothing is written before it is known
    plan, model, optimizer: what the rank trains
    """

    def __init__(self, ranks: RankInfo, *, where: PhaseTracker, has_history: bool) -> None:
        self.directory: Path | None = None
        self.plan: Plan | None = None
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._ranks, self._where = ranks, where
        self._has_history = has_history and ranks.device.type == "cuda"
        self._reserve: bytearray | None = None
        self._host_bytes_before = 0

    def __enter__(self) -> Self:
        self._host_bytes_before = self._read_host_bytes()
        self._reserve = bytearray(_RESERVE_BYTES)
        if self._has_history:
            record_memory_history(_MOST_HISTORY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserve = None
        if error is not None and is_out_of_memory(error):
            report = self._make_report(error)
            raise self._write_and_describe(report) from error
        if self._has_history:
            record_memory_history(None)

    def _make_report(self, error: BaseException) -> OutOfMemoryReport:
        device = self._ranks.device
        held = {} if self.model is None else storage_bytes_by_part(self.model, self.optimizer, device=device)
        meter = LiveMemoryMeter(device)
        free = meter.read_free_bytes()
        meter.close()
        if device.type == "cuda":
            live, left = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
        else:
            live, left = self._read_host_bytes() - self._host_bytes_before, free.get("host_bytes")
        prediction = None if self.plan is None else self.plan.prediction
        return OutOfMemoryReport(
            at=datetime.now(UTC),
            rank=self._ranks.rank,
            host=socket.gethostname(),
            device=str(device),
            step=self._where.step + 1,
            phase=str(self._where.phase),
            place=error_location_text(error),
            error=_first_line(error),
            requested_bytes=requested_bytes(str(error)),
            held={**held, "rest": max(0, live - sum(held.values()))},
            reserved_bytes=torch.cuda.memory_reserved(device) if device.type == "cuda" else None,
            free_bytes=left,
            planned=None if prediction is None else prediction.memory,
            planned_limit_bytes=None if prediction is None else prediction.capacity_bytes,
            snapshot=self._dump_snapshot(),
        )

    def _write_and_describe(self, report: OutOfMemoryReport) -> TrainError:
        """Writes the report and its event, and returns the error that names it."""
        fix = 'a smaller train.microbatch, recompute.mode = "full", or more ranks'
        if self.directory is not None:
            path = self._report_path(".txt")
            with suppress(OSError):  # the error has the most important part
                path.parent.mkdir(exist_ok=True)
                path.write_text(report.format_text(), encoding="utf-8")
                path.with_suffix(".json").write_text(report.model_dump_json() + "\n", encoding="utf-8")
                fix = f"{path} has what it held, term by term, beside the plan"
                details = {"rank": report.rank, "phase": report.phase, "held_bytes": report.held_bytes}
                details |= {"requested_bytes": report.requested_bytes, "path": str(path)}
                events = self.directory / EVENTS
                attempt = count_attempts(events) or 1
                event = RunEvent.now("out_of_memory", attempt=attempt, step=report.step, details=details)
                event.append_to(events)
        return TrainError(
            f"rank {report.rank} ran out of memory in {report.phase} of step {report.step}.",
            got=report.summary,
            why=f"{report.place}: {report.error}",
            fix=fix,
        )

    def _report_path(self, suffix: str) -> Path:
        assert self.directory is not None, "the caller has checked it"
        name = f"step-{self._where.step + 1:08}-rank-{self._ranks.rank:05}"
        return self.directory / OUT_OF_MEMORY / f"{name}{suffix}"

    def _dump_snapshot(self) -> str | None:
        """Writes torch's snapshot of the CUDA allocator, and returns its name; None without one."""
        if self._ranks.device.type != "cuda" or self.directory is None:
            return None
        path = self._report_path(".pickle")
        try:
            path.parent.mkdir(exist_ok=True)
            dump_memory_snapshot(str(path))
        except (OSError, RuntimeError):
            return None
        return path.name

    def _read_host_bytes(self) -> int:
        meter = LiveMemoryMeter(torch.device("cpu"))
        live = meter.read().host_bytes or 0
        meter.close()
        return live


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error`, or an error that it was raised from, is an allocation that failed."""
    for one in _iterate_causes(error):
        if isinstance(one, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(one, OSError) and one.errno == errno.ENOMEM:
            return True
        if isinstance(one, RuntimeError) and any(sign in str(one).lower() for sign in _SIGNS):
            return True
    return False


def requested_bytes(message: str) -> int | None:
    """Returns the size of the allocation that failed, by torch's message; None if it does not say."""
    found = _REQUESTED.search(message)
    return None if found is None else round(float(found[1]) * _FACTORS[found[2] or "bytes"])


def _iterate_causes(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.partition("\n")[0]
    return line[max(0, line.find("DefaultCPUAllocator")) :]  # without the C++ file and condition
