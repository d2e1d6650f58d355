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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from pydantic import computed_field

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.report.plan import term_label
from fullshard.report.table import show_table
from fullshard.spec.measurement import Measurement, PeakBytes
from fullshard.spec.prediction import CALIBRATION_MARKS, CalibrationState, Prediction
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
_SAME_SECONDS = (
    "model_parallel",
    "exposed_all_gather",
    "exposed_reduce_scatter",
    "exposed_all_reduce",
    "engine",
)


class ComparisonLine(FrozenModel):
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
    """Lines of each part of a comparison. Parts that were not measured are empty."""

    memory: tuple[ComparisonLine, ...] = ()  # bytes at the fullest rank's peak, then `total` and `reserved`
    drive: tuple[ComparisonLine, ...] = ()  # bytes that a rank moves to and from its offload drive in a step
    step: tuple[ComparisonLine, ...] = ()  # seconds of one step, then `total`
    speed: tuple[ComparisonLine, ...] = ()  # tokens/s of all ranks, and MFU
    calibration: CalibrationState = "idle"  # how the rates that the seconds were predicted with were measured


def compare_prediction(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Compares a prediction with a measurement. See [Note: terms that share a line]."""
    peak = measurement.peak_bytes
    return Comparison(
        memory=() if peak is None else tuple(_compare_memory(prediction, peak)),
        drive=tuple(_compare_drive_traffic(prediction, measurement)),
        step=tuple(_compare_step_time(prediction, measurement)),
        speed=tuple(_compare_speed(prediction, measurement)),
        calibration=prediction.calibration,
    )


def show_comparison(comparison: Comparison, *, file: TextIO | None = None) -> None:
    """Prints the comparison as a table to `file` (standard output by default)."""
    show_table(HEADER, comparison_rows(comparison), file=file)


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the table's cells, row by row, with one heading per part.

    Left out are terms that are zero on both sides, and memory below CRUMB_BYTES of the whole.
    """
    rows: list[tuple[str, ...]] = []
    memory = drop_crumbs(comparison.memory)
    mark = CALIBRATION_MARKS[comparison.calibration]
    step = f"step ({mark})" if mark else "step"
    for heading, lines, show in (
        ("memory", memory, format_bytes),
        ("drive", comparison.drive, format_bytes),
        (step, comparison.step, format_seconds),
    ):
        if lines:
            rows += [(heading, "", "", ""), *_format_line_cells(lines, show)]
    for line in comparison.speed:
        show = format_count if line.term == "tokens_per_second" else _format_fraction_as_percent
        rows += _format_line_cells([line], show, indent="")
    return rows


def drop_crumbs(memory: Sequence[ComparisonLine]) -> list[ComparisonLine]:
    """Returns the lines of memory, without those below CRUMB_BYTES of the whole."""
    least = CRUMB_BYTES * max((line.measured or 0.0 for line in memory), default=0.0)
    return [line for line in memory if max(line.predicted or 0.0, line.measured or 0.0) >= least]


def line_label(line: ComparisonLine) -> str:
    """Returns the printed label of a line."""
    return _LABELS.get(line.term) or term_label(line.term)


def _compare_memory(prediction: Prediction, peak: PeakBytes) -> Iterable[ComparisonLine]:
    on_cuda = peak.allocated is not None
    apart = {"rest", *(_NOT_MEASURED_ON_CUDA if on_cuda else ())}
    seen = {name: count for name, count in peak.parts().items() if name not in apart}
    predicted = prediction.memory.terms()
    total = peak.total if peak.allocated is None else peak.allocated
    for name, count in seen.items():
        yield ComparisonLine(term=name, predicted=predicted[name], measured=count)
    rest = prediction.memory.total - sum(predicted[name] for name in seen)
    yield ComparisonLine(term="rest", predicted=rest, measured=total - sum(seen.values()))
    yield ComparisonLine(term="total", predicted=prediction.memory.total, measured=total)
    if peak.reserved is not None:
        reserved = prediction.total_reserved_bytes
        yield ComparisonLine(term="reserved", predicted=reserved, measured=peak.reserved)
    if prediction.offload is not None and peak.host is not None:
        yield ComparisonLine(term="host", predicted=prediction.offload.host_bytes, measured=peak.host)


def _compare_drive_traffic(prediction: Prediction, measurement: Measurement) -> Iterable[ComparisonLine]:
    predicted, moved = prediction.offload, measurement.drive
    if predicted is not None and moved is not None and predicted.disk_bytes:
        yield ComparisonLine(term="read", predicted=predicted.disk_read_bytes, measured=moved.read)
        yield ComparisonLine(term="written", predicted=predicted.disk_written_bytes, measured=moved.written)


def _compare_step_time(prediction: Prediction, measurement: Measurement) -> Iterable[ComparisonLine]:
    predicted, step = prediction.time, measurement.step_seconds
    if step is not None:
        computing = predicted.compute + predicted.recompute + predicted.contention
        yield ComparisonLine(term="compute", predicted=computing, measured=step.compute + step.other)
        seen: Mapping[str, float] = step.terms()
        for name in _SAME_SECONDS:
            yield ComparisonLine(term=name, predicted=predicted.terms()[name], measured=seen[name])
        update = predicted.optimizer + (predicted.offload if prediction.offload is not None else 0.0)
        known = update if prediction.has_complete_step_time else None
        yield ComparisonLine(term="optimizer", predicted=known, measured=seen["optimizer"])
        yield ComparisonLine(term="data", measured=step.data)
        yield ComparisonLine(term="stragglers", predicted=predicted.stragglers)
    seconds = measurement.pace.step_seconds
    if seconds is not None:
        total = predicted.total if prediction.has_complete_step_time else None
        yield ComparisonLine(term="total", predicted=total, measured=seconds)


def _compare_speed(prediction: Prediction, measurement: Measurement) -> Iterable[ComparisonLine]:
    rate, timed = measurement.tokens_per_second, prediction.has_complete_step_time
    if rate is not None:
        predicted = prediction.tokens_per_second if timed else None
        yield ComparisonLine(term="tokens_per_second", predicted=predicted, measured=rate)
    if rate is not None and measurement.mfu is not None:
        # Of the measurement's peak: the planner may know another one, from the catalog or a calibration.
        mfu = measurement.mfu * prediction.tokens_per_second / rate if timed else None
        yield ComparisonLine(term="mfu", predicted=mfu, measured=measurement.mfu)


def _format_line_cells(
    lines: Iterable[ComparisonLine], show: Callable[[float], str], *, indent: str = "  "
) -> Iterable[tuple[str, ...]]:
    for line in lines:
        if line.predicted or line.measured:
            error = line.error_percent
            yield (
                f"{indent}{line_label(line)}",
                "-" if line.predicted is None else show(line.predicted),
                "-" if line.measured is None else show(line.measured),
                "" if error is None else f"{error:+,.{1 if abs(error) < 1000 else 0}f} %",
            )


def _format_fraction_as_percent(part: float) -> str:
    return f"{100 * part:.1f} %"
