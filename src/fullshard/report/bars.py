"""Predicted and measured terms of a run as HTML tables with bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from fullshard.quantities import format_bytes, format_seconds
from fullshard.report.comparison import ComparisonLine, compare_prediction, drop_crumbs, line_label
from fullshard.report.markup import cell, escape, percent_text, table
from fullshard.report.run_record import RunRecord
from fullshard.spec.measurement import Measurement
from fullshard.spec.prediction import CALIBRATION_MARKS, Prediction

_NOT_SUMMED = ("total", "reserved", "host")  # terms that are no parts of the sum
_NOTABLE_PERCENT = 10.0
_KEY = '<span class="measured">▬ measured</span>&ensp;<span class="predicted">▏predicted</span>'


def memory_table(run: RunRecord) -> str:
    """Returns bytes by part at the peak, predicted and measured, and the device's capacity; "" if unknown."""
    prediction, peaks = _prediction_of(run), run.metrics.values("peak_bytes")
    if run.measurement is not None and prediction is not None:
        lines = list(compare_prediction(prediction, run.measurement).memory)
    elif run.measurement is not None:
        lines = list(_measured_memory(run.measurement))
    else:
        terms = {} if prediction is None else prediction.memory.terms()
        lines = list(_predicted_lines(terms, measured=max(peaks, default=None)))
    shown = _bar_table(drop_crumbs(lines), format_bytes)
    return shown + ("" if not shown or prediction is None else _capacity_bar(lines, prediction))


def seconds_table(run: RunRecord) -> str:
    """Returns the seconds of a step by term, predicted and measured; an empty text if nothing is known."""
    prediction, seconds = _prediction_of(run), run.metrics.values("seconds")
    if run.measurement is not None and prediction is not None:
        lines = list(compare_prediction(prediction, run.measurement).step)
    elif run.measurement is not None:
        lines = list(_measured_seconds(run.measurement))
    else:
        terms = {} if prediction is None else prediction.time.terms()
        lines = list(_predicted_lines(terms, measured=median(seconds) if seconds else None))
    mark = "" if prediction is None else CALIBRATION_MARKS[prediction.calibration]
    note = f'<p class="dim">Rates: {mark}; fullshard calibrate measures them.' if mark else ""
    shown = _bar_table(lines, format_seconds)
    return shown and shown + note


def _prediction_of(run: RunRecord) -> Prediction | None:
    return None if run.plan is None else run.plan.prediction


def _predicted_lines(terms: Mapping[str, float], *, measured: float | None) -> Iterator[ComparisonLine]:
    """Yields the lines of a run without a measurement, of which at most the sum is known."""
    for name, value in terms.items():
        yield ComparisonLine(term=name, predicted=value)
    if terms or measured is not None:
        total = sum(terms.values()) if terms else None
        yield ComparisonLine(term="total", predicted=total, measured=measured)


def _measured_memory(measurement: Measurement) -> Iterator[ComparisonLine]:
    peak = measurement.peak_bytes
    if peak is not None:
        for name, count in peak.parts().items():
            yield ComparisonLine(term=name, measured=count)
        yield ComparisonLine(term="total", measured=peak.total)


def _measured_seconds(measurement: Measurement) -> Iterator[ComparisonLine]:
    step, seconds = measurement.step_seconds, measurement.pace.step_seconds
    for name, value in ({} if step is None else step.terms()).items():
        yield ComparisonLine(term=name, measured=value)
    if seconds is not None:
        yield ComparisonLine(term="total", measured=seconds)


def _bar_table(lines: Sequence[ComparisonLine], show: Callable[[float], str]) -> str:
    """Returns a table with a bar for each measured term, marked at what was predicted; "" without lines."""
    lines = [line for line in lines if line.predicted or line.measured]
    if not lines:
        return ""
    parts = [line for line in lines if line.term not in _NOT_SUMMED]
    longest = max((max(line.predicted or 0.0, line.measured or 0.0) for line in parts), default=0.0)
    rows: list[list[str]] = []
    for line in lines:
        bar = ""
        if line.term not in _NOT_SUMMED:
            bar = _bar(_share(line.measured, longest), _share(line.predicted, longest))
        known = ["–" if value is None else show(value) for value in (line.predicted, line.measured)]
        rows.append([escape(line_label(line)), *known, error_cell(line.error_percent), bar])
    made = table(["", "predicted", "measured", "error", "key"], rows, kind="bars")
    return f'<div class="scroll">{made.replace("<th>key", f"<th>{_KEY}", 1)}</div>'


def error_cell(percent: float | None) -> str:
    """Returns the table cell of a prediction's error, which stands out if it is notable."""
    if percent is None:
        return cell("", "")
    digits = 1 if abs(percent) < 1000 else 0
    return cell(f"{percent:+,.{digits}f} %", "bad" if abs(percent) >= _NOTABLE_PERCENT else "")


def _capacity_bar(lines: Sequence[ComparisonLine], prediction: Prediction) -> str:
    """Returns what the run needs of the device's memory, as a bar whose whole length is the capacity."""
    measured = {line.term: line.measured for line in lines if line.measured is not None}
    needed, capacity = prediction.required_device_bytes, prediction.capacity_bytes
    used = measured.get("reserved", measured.get("total"))
    figures = f"{format_bytes(needed)} ({percent_text(needed, capacity)}) predicted"
    if prediction.context_bytes or prediction.allocator_reserve_bytes:
        figures += ", with the allocator's reserve and the device context"
    if used is not None:
        figures += f"; {format_bytes(used)} ({percent_text(used, capacity)}) measured"
    bar = _bar(_share(used, capacity), _share(needed, capacity)).replace('"bar"', '"bar room"')
    return f"<p>Of the {format_bytes(capacity)} that a rank has: {figures}.{bar}"


def _share(value: float | None, whole: float) -> float | None:
    return None if value is None or not whole else min(max(value / whole, 0.0), 1.0)


def _bar(measured: float | None, predicted: float | None) -> str:
    if measured is None:  # nothing to mark: the prediction is the bar
        inner = f'<b class="predicted" style="width:{100 * (predicted or 0.0):.2f}%"></b>'
        return f'<div class="bar">{inner}</div>'
    marked = "" if predicted is None else f'<i style="left:{100 * predicted:.2f}%"></i>'
    return f'<div class="bar"><b style="width:{100 * measured:.2f}%"></b>{marked}</div>'
