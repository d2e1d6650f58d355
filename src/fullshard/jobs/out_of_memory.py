"""Reports of a rank that runs out of memory: `<run.dir>/out-of-memory/step-<step>-rank-<rank>.txt`."""

import errno
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from torch import nn

from fullshard.errors import TrainError, user_code_location_text
from fullshard.observe.memory import read_live_bytes, storages_by_part
from fullshard.observe.run_log import count_attempts
from fullshard.parallel.mesh import RankInfo
from fullshard.quantities import format_bytes
from fullshard.report.comparison import Comparison, compare_parts, comparison_rows
from fullshard.report.table import format_table_lines
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.run_files import EVENTS, OUT_OF_MEMORY
from fullshard.survival.phase import PhaseTracker
from fullshard.system.files import write_file_atomically

# Parts of the messages of torch's allocators, of C++, of drivers and of cuBLAS.
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB)?")
_FACTORS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_RESERVE_BYTES = 16 << 20  # freed before the report is made; never written to, so it is not resident memory


class OutOfMemoryReporter:
    """Context that writes a report if an allocation in its block fails, and raises a TrainError.

    The caller sets the fields as soon as it has them:

    directory: the run's directory; nothing is written before it is known
    plan, model, optimizer: what the rank trains
    """

    def __init__(self, ranks: RankInfo, *, where: PhaseTracker) -> None:
        self.directory: Path | None = None
        self.plan: Plan | None = None
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._ranks, self._where = ranks, where
        self._reserve: bytearray | None = None
        self._bytes_before = 0

    def __enter__(self) -> Self:
        self._bytes_before = read_live_bytes(self._ranks.device)
        self._reserve = bytearray(_RESERVE_BYTES)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._reserve = None
        if error is not None and is_out_of_memory(error):
            raise self._report(error) from error

    def _report(self, error: BaseException) -> TrainError:
        """Writes the report and its event, and returns the error that names it."""
        device, rank, step = self._ranks.device, self._ranks.rank, self._where.step + 1
        live, held = read_live_bytes(device) - self._bytes_before, dict[str, int]()
        if self.model is not None:
            parts = storages_by_part(self.model, self.optimizer, device=device)
            held = {name: sum(part.values()) for name, part in parts.items()}
        requested, held_bytes = requested_bytes(str(error)), max(live, sum(held.values()))
        asked = "" if requested is None else f"{format_bytes(requested)} more, "
        what = f"rank {rank} ran out of memory in {self._where.phase} of step {step}."
        got = f"{asked}while it held {format_bytes(held_bytes)} of tensors"
        why = f"{user_code_location_text(error)}: {_first_line(error)}"
        fix = 'a smaller train.microbatch, recompute.mode = "full", or more GPUs or machines'
        if self.directory is not None:
            path = self.directory / OUT_OF_MEMORY / f"step-{step:08}-rank-{rank:05}.txt"
            prediction = None if self.plan is None else self.plan.prediction
            table = format_held_bytes(held, total=held_bytes, requested=requested, prediction=prediction)
            details = {"rank": rank, "phase": str(self._where.phase), "held_bytes": held_bytes}
            details |= {"requested_bytes": requested, "path": str(path)}
            with suppress(OSError):  # the error has the most important part
                path.parent.mkdir(exist_ok=True)
                write_file_atomically(path, f"{what}\n  {got}\n  {why}\n\n{table}\n")
                fix = f"{path} has what it held, term by term, beside the plan"
                events = self.directory / EVENTS
                attempt = count_attempts(events) or 1
                RunEvent.now("out_of_memory", attempt=attempt, step=step, details=details).append_to(events)
        return TrainError(what, got=got, why=why, fix=fix)


def format_held_bytes(
    held: Mapping[str, int], *, total: int, requested: int | None, prediction: Prediction | None
) -> str:
    """Returns the table of the bytes that a rank held, beside those that the plan has at its peak.

    held: bytes by part, without activations, gathered parameters and everything else; total: with these
    requested: size of the allocation that failed; None if it is unknown
    """
    memory = Comparison(memory=tuple(compare_parts(prediction, held, total=total)))
    lines = [*format_table_lines(("", "planned", "held", "error"), comparison_rows(memory)), ""]
    if prediction is None:
        return "\n".join([*lines, "The run has no prediction to compare with."])
    if total + (requested or 0) > 1.05 * prediction.memory.total:
        cause = "More was needed than planned: the model, the loss or the data holds tensors of its own."
    else:
        cause = "Less was available than planned: another process, or a limit on this one, holds the rest."
    limit = f", of {format_bytes(prediction.capacity_bytes)}" if prediction.capacity_bytes else ""
    planned = format_bytes(prediction.memory.total)
    return "\n".join([*lines, f"The plan's peak is {planned}{limit}. {cause}"])


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error`, or an error that it was raised from, is an allocation that failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def requested_bytes(message: str) -> int | None:
    """Returns the size of the allocation that failed, by torch's message; None if it does not say."""
    found = _REQUESTED.search(message)
    return None if found is None else round(float(found[1]) * _FACTORS[found[2] or "bytes"])


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.partition("\n")[0]
    return line[max(0, line.find("DefaultCPUAllocator")) :]  # without the C++ file and condition
