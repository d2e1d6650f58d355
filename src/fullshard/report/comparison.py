"""Predicted | measured: what was said of a run beside what was seen of it, term by term.

[Note: terms that are one line]
What the meters cannot tell apart stands on one line, and so does what was predicted of it.

bytes     The rest (batch, whole gradients, activations, loss, backward) is one part on the CPU. CUDA's
          allocator does not tell what is alive at the peak: there gradients and units in flight are in it.
seconds   Recompute is within computing, contention makes computing slower, and the gaps in which the device
          waits for the host are predicted as computing: all this stands beside what was measured as compute
          and other. Stragglers are predicted apart, and measured within the waiting. With a tier the update
          is there: by how much host and drive are predicted to hold a step up stands beside what was measured
          as the optimizer, though gathers may wait for some of it. Where the drive's rate was not known, what
          needs it was not predicted.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from pydantic import computed_field

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.report.grid import show_grid
from fullshard.report.plan import MEMORY_LABELS, TIME_LABELS
from fullshard.spec.measurement import Measurement, PeakBytes
from fullshard.spec.prediction import Prediction
from fullshard.spec.value import FrozenModel

HEADER = ("", "predicted", "measured", "error")
CRUMB_BYTES = 1e-5  # the part of a rank's bytes below which a term gets no line of its own
_LABELS = {
    **MEMORY_LABELS,
    **TIME_LABELS,
    "rest": "activations, rest",
    "compute": "compute, host",
    "data": "waiting: data",
    "total": "in all",
    "host": "host memory, beside",
    "read": "read in a step",
    "written": "written in a step",
    "reserved": "reserved",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
}
_SAME_BYTES = ("parameter_shards", "gradients", "optimizer_state", "buffers", "units_in_flight")
_NOT_TOLD_BY_CUDA = ("gradients", "units_in_flight")
_SAME_SECONDS = ("exposed_all_gather", "exposed_reduce_scatter", "exposed_all_reduce", "engine")


class Compared(FrozenModel):
    """One line. What was not predicted, or cannot be measured apart, is None."""

    term: str
    predicted: float | None = None
    measured: float | None = None

    @computed_field
    @property
    def error_percent(self) -> float | None:
        """100 · (predicted / measured - 1); None where one of both is not known, or nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return 100 * (self.predicted / self.measured - 1)


class Comparison(FrozenModel):
    """`memory`: bytes at the peak of the fullest rank. `drive`: bytes that it moves for a tier in one step.
    `step`: seconds of one step. `speed`: tokens/s of all ranks, and MFU. Memory and step have `total` (and
    `reserved`) behind their terms. What was not measured is empty."""

    memory: tuple[Compared, ...] = ()
    drive: tuple[Compared, ...] = ()
    step: tuple[Compared, ...] = ()
    speed: tuple[Compared, ...] = ()


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Holds one against the other. See [Note: terms that are one line]."""
    peak = measurement.peak_bytes
    return Comparison(
        memory=() if peak is None else tuple(_memory(prediction, peak)),
        drive=tuple(_drive(prediction, measurement)),
        step=tuple(_step(prediction, measurement)),
        speed=tuple(_speed(prediction, measurement)),
    )


def show_comparison(comparison: Comparison, *, file: TextIO | None = None) -> None:
    """Prints the table on `file` (standard output)."""
    show_grid(HEADER, comparison_rows(comparison), file=file)


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells, under a line for memory and one for the step. What is nothing in both has no line; of memory
    also what is less than a hundred thousandth of the whole: a tier leaves an element of each parameter."""
    rows: list[tuple[str, ...]] = []
    if comparison.memory:
        whole = max(line.measured or 0.0 for line in comparison.memory)
        rows.append(("memory", "", "", ""))
        rows += _cells(
            [one for one in comparison.memory if _larger(one) >= CRUMB_BYTES * whole], format_bytes
        )
    if comparison.drive:
        rows.append(("drive", "", "", ""))
        rows += _cells(comparison.drive, format_bytes)
    if comparison.step:
        rows.append(("step", "", "", ""))
        rows += _cells(comparison.step, format_seconds)
    for line in comparison.speed:
        show = format_count if line.term == "tokens_per_second" else _percent
        rows += _cells([line], show, indent="")
    return rows


def _memory(prediction: Prediction, peak: PeakBytes) -> Iterable[Compared]:
    on_cuda = peak.allocated is not None
    same = [name for name in _SAME_BYTES if not (on_cuda and name in _NOT_TOLD_BY_CUDA)]
    predicted = prediction.memory.terms()
    total = peak.total if peak.allocated is None else peak.allocated
    seen = {name: getattr(peak, name) for name in same}
    for name in same:
        yield Compared(term=name, predicted=predicted[name], measured=seen[name])
    yield Compared(
        term="rest",
        predicted=prediction.memory.total - sum(predicted[name] for name in same),
        measured=total - sum(seen.values()),
    )
    yield Compared(term="total", predicted=prediction.memory.total, measured=total)
    if peak.reserved is not None:
        yield Compared(term="reserved", predicted=prediction.reserved_bytes, measured=peak.reserved)
    if prediction.offload is not None and peak.host is not None:
        yield Compared(term="host", predicted=prediction.offload.host_bytes, measured=peak.host)


def _drive(prediction: Prediction, measurement: Measurement) -> Iterable[Compared]:
    predicted, moved = prediction.offload, measurement.drive
    if predicted is not None and moved is not None and predicted.disk_bytes:
        yield Compared(term="read", predicted=predicted.disk_read_bytes, measured=moved.read)
        yield Compared(term="written", predicted=predicted.disk_written_bytes, measured=moved.written)


def _step(prediction: Prediction, measurement: Measurement) -> Iterable[Compared]:
    predicted, step = prediction.time, measurement.step_seconds
    if step is not None:
        yield Compared(
            term="compute",
            predicted=predicted.compute + predicted.recompute + predicted.contention,
            measured=step.compute + step.other,
        )
        seen: Mapping[str, float] = step.terms()
        for name in _SAME_SECONDS:
            yield Compared(term=name, predicted=predicted.terms()[name], measured=seen[name])
        update = predicted.optimizer + (predicted.offload if prediction.offload is not None else 0.0)
        known = update if prediction.is_timed else None
        yield Compared(term="optimizer", predicted=known, measured=seen["optimizer"])
        yield Compared(term="data", measured=step.data)
        yield Compared(term="stragglers", predicted=predicted.stragglers)
    seconds = measurement.pace.step_seconds
    if seconds is not None:
        yield Compared(
            term="total", predicted=predicted.total if prediction.is_timed else None, measured=seconds
        )


def _speed(prediction: Prediction, measurement: Measurement) -> Iterable[Compared]:
    rate = measurement.tokens_per_second
    timed = prediction.is_timed
    if rate is not None:
        predicted = prediction.tokens_per_second if timed else None
        yield Compared(term="tokens_per_second", predicted=predicted, measured=rate)
    if measurement.mfu is not None and prediction.mfu is not None:
        yield Compared(term="mfu", predicted=prediction.mfu if timed else None, measured=measurement.mfu)


def _cells(
    lines: Iterable[Compared], show: Callable[[float], str], *, indent: str = "  "
) -> Iterable[tuple[str, ...]]:
    for line in lines:
        if line.predicted or line.measured:
            error = line.error_percent
            yield (
                f"{indent}{_LABELS.get(line.term, line.term)}",
                "-" if line.predicted is None else show(line.predicted),
                "-" if line.measured is None else show(line.measured),
                "" if error is None else f"{error:+,.{1 if abs(error) < 1000 else 0}f} %",
            )


def _larger(line: Compared) -> float:
    return max(line.predicted or 0.0, line.measured or 0.0)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
