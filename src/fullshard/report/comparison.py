"""Comparison of a run's prediction with its measurement, term by term.

[Note: terms that share a line]
Terms that cannot be measured separately share one line, with the sum of their predictions.

bytes     The rest (batch, whole gradients, activations, loss, backward) is one line on the CPU. CUDA's
          allocator does not report which tensors are alive at the peak, so on CUDA the rest also contains
          gradients and units in flight.
seconds   Recompute is part of compute, contention slows compute down, and gaps in which the device waits
          for the host are predicted as compute: all of these are compared with measured compute and other.
          Stragglers are predicted separately, and measured as part of the waiting. With an offload target,
          the predicted delay by host and drive is added to the optimizer, because the update is measured
          there, although gathers may wait for some of it. If the drive's rate was unknown, terms that
          need it were not predicted.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from pydantic import computed_field

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.report.plan import label_of
from fullshard.report.table import show_grid
from fullshard.spec.measurement import Measurement, PeakBytes
from fullshard.spec.prediction import Prediction
from fullshard.spec.value import FrozenModel

HEADER = ("", "predicted", "measured", "error")
CRUMB_BYTES = 1e-5  # fraction of a rank's bytes below which a term gets no line of its own
_LABELS = {
    "compute": "compute, host",
    "data": "waiting: data",
    "total": "in all",
    "host": "host memory, beside",
    "read": "read in a step",
    "written": "written in a step",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
}
_NOT_MEASURED_ON_CUDA = ("gradients", "units_in_flight")
_SAME_SECONDS = ("exposed_all_gather", "exposed_reduce_scatter", "exposed_all_reduce", "engine")


class Compared(FrozenModel):
    """One term of a comparison. A value that was not predicted, or cannot be measured separately, is None."""

    term: str
    predicted: float | None = None
    measured: float | None = None

    @computed_field
    @property
    def error_percent(self) -> float | None:
        """100 · (predicted / measured - 1); None if either is unknown, or if nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return 100 * (self.predicted / self.measured - 1)


class Comparison(FrozenModel):
    """Lines of each part of a comparison. Parts that were not measured are empty.

    memory: bytes at the peak of the rank that uses most, then `total` and `reserved`
    drive: bytes that a rank moves to and from its offload drive in one step
    step: seconds of one step, then `total`
    speed: tokens/s of all ranks, and MFU
    """

    memory: tuple[Compared, ...] = ()
    drive: tuple[Compared, ...] = ()
    step: tuple[Compared, ...] = ()
    speed: tuple[Compared, ...] = ()


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Compares a prediction with a measurement. See [Note: terms that share a line]."""
    peak = measurement.peak_bytes
    return Comparison(
        memory=() if peak is None else tuple(_memory(prediction, peak)),
        drive=tuple(_drive(prediction, measurement)),
        step=tuple(_step(prediction, measurement)),
        speed=tuple(_speed(prediction, measurement)),
    )


def show_comparison(comparison: Comparison, *, file: TextIO | None = None) -> None:
    """Prints the comparison as a table to `file` (standard output by default)."""
    show_grid(HEADER, comparison_rows(comparison), file=file)


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the table's cells, row by row, with one heading per part.

    Left out are terms that are zero on both sides, and memory below CRUMB_BYTES of the whole.
    """
    rows: list[tuple[str, ...]] = []
    least = CRUMB_BYTES * max((line.measured or 0.0 for line in comparison.memory), default=0.0)
    memory = [line for line in comparison.memory if max(line.predicted or 0.0, line.measured or 0.0) >= least]
    for heading, lines, show in (
        ("memory", memory, format_bytes),
        ("drive", comparison.drive, format_bytes),
        ("step", comparison.step, format_seconds),
    ):
        if lines:
            rows += [(heading, "", "", ""), *_cells(lines, show)]
    for line in comparison.speed:
        show = format_count if line.term == "tokens_per_second" else _percent
        rows += _cells([line], show, indent="")
    return rows


def _memory(prediction: Prediction, peak: PeakBytes) -> Iterable[Compared]:
    on_cuda = peak.allocated is not None
    apart = {"rest", *(_NOT_MEASURED_ON_CUDA if on_cuda else ())}
    seen = {name: count for name, count in peak.parts().items() if name not in apart}
    predicted = prediction.memory.terms()
    total = peak.total if peak.allocated is None else peak.allocated
    for name, count in seen.items():
        yield Compared(term=name, predicted=predicted[name], measured=count)
    yield Compared(
        term="rest",
        predicted=prediction.memory.total - sum(predicted[name] for name in seen),
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
    rate, timed = measurement.tokens_per_second, prediction.is_timed
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
                f"{indent}{_LABELS.get(line.term) or label_of(line.term)}",
                "-" if line.predicted is None else show(line.predicted),
                "-" if line.measured is None else show(line.measured),
                "" if error is None else f"{error:+,.{1 if abs(error) < 1000 else 0}f} %",
            )


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
