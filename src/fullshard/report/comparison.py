"""The text after a run: its measurement, and its prediction beside it, term by term.

[Note: terms that share a line]
Terms that cannot be measured separately share one line, with the sum of their predictions.

bytes     The rest (batch, whole gradients, activations, loss, backward) is one line on the CPU. CUDA's
          allocator does not report which tensors are alive at the peak, so on CUDA the rest also contains
          gradients and units in flight.
seconds   Recompute is part of compute, contention slows compute down, and the device waits for launches of
          the host: all of these are compared with measured compute and other.
          Stragglers are predicted separately, and measured as part of the waiting. With an offload target,
          the predicted delay by host and drive is added to the optimizer, because the update is measured
          there, although gathers may wait for some of it. If the drive's rate was unknown, terms that
          need it were not predicted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isclose
from statistics import median
from typing import TextIO

from pydantic import computed_field

from fullshard.quantities import (
    count_text,
    format_bytes,
    format_count,
    format_decimal,
    format_seconds,
    format_trained_token_share,
)
from fullshard.report.plan import differing_settings, term_label
from fullshard.report.run_record import RunRecord
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.report.verdict import setup_and_incidents_text, verdict
from fullshard.spec.prediction import CALIBRATION_MARKS, CalibrationState, Prediction
from fullshard.spec.records.measurement import Measurement, PeakBytes
from fullshard.spec.settings.evaluate_section import results_text
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
_COMPUTING = ("compute", "recompute", "launch_gaps", "contention")
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

    memory: tuple[ComparisonLine, ...] = ()  # bytes at the fullest rank's peak, `total`, `reserved`, `host`
    drive: tuple[ComparisonLine, ...] = ()  # bytes that a rank moves to and from its offload drive in a step
    step: tuple[ComparisonLine, ...] = ()  # seconds of one step, then `total`
    speed: tuple[ComparisonLine, ...] = ()  # tokens/s of all ranks, and MFU if both have one peak
    calibration: CalibrationState = "idle"  # how the rates that the seconds were predicted with were measured


def compare_prediction(prediction: Prediction | None, measurement: Measurement) -> Comparison:
    """Compares a prediction, if there is one, with a measurement. See [Note: terms that share a line]."""
    peak = measurement.peak_bytes
    return Comparison(
        memory=() if peak is None else tuple(_compare_memory(prediction, peak)),
        drive=tuple(_compare_drive_bytes(prediction, measurement)),
        step=tuple(_compare_step_time(prediction, measurement)),
        speed=tuple(_compare_speed(prediction, measurement)),
        calibration="idle" if prediction is None else prediction.calibration,
    )


def compare_run(run: RunRecord) -> Comparison:
    """Compares a run's prediction with its measurement, or the last attempt's peak and median seconds."""
    prediction = run.prediction
    if run.measurement is not None:
        return compare_prediction(prediction, run.measurement)
    peak, seconds = (run.values_of_last_attempt(name) for name in ("peak_bytes", "seconds"))
    memory = {} if prediction is None else prediction.memory.terms()
    step = {} if prediction is None else prediction.time.terms()
    return Comparison(
        memory=tuple(_compare_terms(memory, max(peak, default=None))),
        step=tuple(_compare_terms(step, median(seconds) if seconds else None)),
        calibration="idle" if prediction is None else prediction.calibration,
    )


def _compare_terms(predicted: Mapping[str, float], measured: float | None) -> Iterator[ComparisonLine]:
    if predicted or measured is not None:
        for name, value in predicted.items():
            yield ComparisonLine(term=name, predicted=value)
        whole = sum(predicted.values()) if predicted else None
        yield ComparisonLine(term="total", predicted=whole, measured=measured)


def show_run(run: RunRecord) -> None:
    """Prints what a run measured so far, and bytes and seconds beside the predicted ones."""
    if run.measurement is not None:
        show_measurement(run.measurement, prediction=run.prediction)
    else:
        show_labelled_lines(
            [("run", str(run.directory)), ("", verdict(run)), ("", setup_and_incidents_text(run))]
        )
        _show_comparison(compare_run(run), file=None)


def show_measurement(
    measurement: Measurement, *, prediction: Prediction | None = None, file: TextIO | None = None
) -> None:
    """Prints the measurement, and bytes and seconds beside the predicted ones, to `file` (stdout)."""
    show_labelled_lines(measurement_rows(measurement), file=file)
    _show_comparison(compare_prediction(prediction, measurement), file=file)


def _show_comparison(comparison: Comparison, *, file: TextIO | None) -> None:
    if rows := comparison_rows(comparison):
        print(file=file)
        show_table(HEADER, rows, file=file)


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the table's cells, row by row, with a heading for each part except the speed."""
    rows: list[tuple[str, ...]] = []
    for part, lines in _iterate_parts(comparison):
        mark = CALIBRATION_MARKS[comparison.calibration] if part == "step" else ""
        rows += [(f"{part} ({mark})" if mark else part, "", "", "")] if part else []
        rows += lines
    return rows


def _iterate_parts(comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields each part's name and rows of cells. The speed's name is empty.

    Left out are terms that are zero on both sides, memory below CRUMB_BYTES of the whole, and the errors of
    seconds that were predicted with rates not measured on this machine.
    """
    least = CRUMB_BYTES * max((line.measured or 0.0 for line in comparison.memory), default=0.0)
    memory = [one for one in comparison.memory if max(one.predicted or 0.0, one.measured or 0.0) >= least]
    is_uncalibrated = comparison.calibration == "none"
    for part, lines, show in (
        ("memory", memory, format_bytes),
        ("drive", comparison.drive, format_bytes),
        ("step", comparison.step, format_seconds),
    ):
        if lines:
            hidden = is_uncalibrated and part == "step"
            yield part, list(_format_line_cells(lines, show, without_errors=hidden))
    for line in comparison.speed:
        show = format_count if line.term == "tokens_per_second" else (lambda part: f"{100 * part:.1f} %")
        yield "", list(_format_line_cells([line], show, indent="", without_errors=is_uncalibrated))


def side_by_side_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a table with a column per run.

    Rows: settings that differ, state, losses, measured bytes, seconds and speed, and the number of events of
    each kind.
    """
    columns = [dict(_iterate_run_cells(run)) for run in runs]
    rows: list[list[str]] = []
    plans = [run.plan.run for run in runs if run.plan is not None]
    if len(plans) == len(runs) and (changed := differing_settings(plans)):
        rows += [["settings", *("" for _ in runs)], *([f"  {key}", *values] for key, values in changed)]
    keys = dict.fromkeys(key for column in columns for key in column)
    for part in dict.fromkeys(part for part, _ in keys):
        rows += [[part, *("" for _ in runs)]] if part else []
        own = (key for key in keys if key[0] == part)
        rows += [[key[1], *(column.get(key, "-") for column in columns)] for key in own]
    return ["", *(str(run.directory) for run in runs)], rows


def _iterate_run_cells(run: RunRecord) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields ((part, label), text) of what a run measured, with an empty part for lines about all of it."""
    yield ("", "state"), f"{run.state}, step {run.last_step:,}"
    for name, label in (("loss", "loss"), ("validation_loss", "validation loss")):
        if values := run.metrics.values(name):
            yield ("", label), f"{values[-1]:.4f}"
    for name, points in run.metrics.results.items():
        yield ("", name), f"{points[-1][1]:.4f}"
    for part, lines in _iterate_parts(compare_run(run)):
        yield from (((part, label), measured) for label, _, measured, _ in lines)
    for kind, count in Counter(event.event for event in run.events if event.event != "plan").items():
        yield ("events", f"  {kind.replace('_', ' ')}"), f"{count:,}"


def compare_parts(
    prediction: Prediction | None, parts: Mapping[str, int], *, total: int
) -> Iterable[ComparisonLine]:
    """Yields a line for each part that was measured, one for the rest of `total`, and one for the total."""
    predicted = {} if prediction is None else prediction.memory.terms()
    whole = sum(predicted.values()) if predicted else None
    for name, count in parts.items():
        yield ComparisonLine(term=name, predicted=predicted.get(name), measured=count)
    rest = None if whole is None else whole - sum(predicted[name] for name in parts)
    yield ComparisonLine(term="rest", predicted=rest, measured=total - sum(parts.values()))
    yield ComparisonLine(term="total", predicted=whole, measured=total)


def _compare_memory(prediction: Prediction | None, peak: PeakBytes) -> Iterable[ComparisonLine]:
    apart = {"rest", *(() if peak.allocated is None else _NOT_MEASURED_ON_CUDA)}
    if not peak.parameter_averages and not (prediction and prediction.memory.parameter_averages):
        apart.add("parameter_averages")
    seen = {name: count for name, count in peak.parts().items() if name not in apart}
    total = peak.total if peak.allocated is None else peak.allocated
    yield from compare_parts(prediction, seen, total=total)
    if peak.reserved is not None:
        reserved = None if prediction is None else prediction.total_reserved_bytes
        yield ComparisonLine(term="reserved", predicted=reserved, measured=peak.reserved)
    if peak.host is not None:
        offload = None if prediction is None else prediction.offload
        host = None if offload is None else offload.host_bytes
        yield ComparisonLine(term="host", predicted=host, measured=peak.host)


def _compare_drive_bytes(prediction: Prediction | None, measurement: Measurement) -> Iterable[ComparisonLine]:
    moved = measurement.drive
    if moved is not None:
        terms = None if prediction is None else prediction.offload
        read, written = (None, None) if terms is None else (terms.disk_read_bytes, terms.disk_written_bytes)
        yield ComparisonLine(term="read", predicted=read, measured=moved.read)
        yield ComparisonLine(term="written", predicted=written, measured=moved.written)


def _compare_step_time(prediction: Prediction | None, measurement: Measurement) -> Iterable[ComparisonLine]:
    step, seconds = measurement.step_seconds, measurement.pace.step_seconds
    predicted = {} if prediction is None else prediction.time.terms()
    update = total = None
    if prediction is not None and prediction.has_complete_step_time:
        total = prediction.time.total
        update = predicted["optimizer"] + (0.0 if prediction.offload is None else predicted["offload"])
    if step is not None:
        computing = sum(predicted[name] for name in _COMPUTING) if predicted else None
        yield ComparisonLine(term="compute", predicted=computing, measured=step.compute + step.other)
        seen: Mapping[str, float] = step.terms()
        for name in _SAME_SECONDS:
            yield ComparisonLine(term=name, predicted=predicted.get(name), measured=seen[name])
        yield ComparisonLine(term="optimizer", predicted=update, measured=seen["optimizer"])
        yield ComparisonLine(term="data", measured=step.data)
        yield ComparisonLine(term="stragglers", predicted=predicted.get("stragglers"))
    if seconds is not None:
        yield ComparisonLine(term="total", predicted=total, measured=seconds)


def _compare_speed(prediction: Prediction | None, measurement: Measurement) -> Iterable[ComparisonLine]:
    rate, mfu = measurement.tokens_per_second, measurement.mfu
    if rate is None:
        return
    predicted = planned = None
    if prediction is not None and prediction.has_complete_step_time:
        predicted, planned = prediction.tokens_per_second, prediction.mfu
    yield ComparisonLine(term="tokens_per_second", predicted=predicted, measured=rate)
    if mfu is not None:
        # Without a known peak, plan and run each have their own, and their MFUs cannot be compared.
        same_peak = predicted and planned and isclose(planned * rate, mfu * predicted, rel_tol=1e-3)
        yield ComparisonLine(term="mfu", predicted=planned if same_peak else None, measured=mfu)


def _format_line_cells(
    lines: Iterable[ComparisonLine],
    show: Callable[[float], str],
    *,
    indent: str = "  ",
    without_errors: bool = False,
) -> Iterable[tuple[str, ...]]:
    for line in lines:
        if line.predicted or line.measured:
            error = None if without_errors else line.error_percent
            yield (
                f"{indent}{_LABELS.get(line.term) or term_label(line.term)}",
                "-" if line.predicted is None else show(line.predicted),
                "-" if line.measured is None else show(line.measured),
                "" if error is None else f"{error:+,.{1 if abs(error) < 1000 else 0}f} %",
            )


def measurement_rows(m: Measurement) -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines about steps, loss, speed and checkpoint, without bytes and causes."""
    yield "run", f"{m.directory}: {m.strategy} on {count_text(m.world_size, 'rank')} ({m.device})"
    if m.offload is not None:
        yield "offload", m.offload
    if not m.pace.steps:
        yield "steps", f"none: {m.last_step} were done before"
        return
    yield "steps", f"{m.first_step} to {m.last_step}, {m.skipped_steps} skipped"
    yield from _loss_rows(m)
    yield from _speed_rows(m)
    if m.startup_seconds is not None:
        yield "first step", f"done {format_seconds(m.startup_seconds)} after the command"
    if m.compilation is not None:
        yield "compiled", m.compilation.format_text()
    if m.checkpoint is not None:
        yield "checkpoint", m.checkpoint


def _loss_rows(m: Measurement) -> Iterator[tuple[str, str]]:
    if m.first_loss is not None and m.last_loss is not None:
        yield "loss", f"{m.first_loss:.4f} in the first step, {m.last_loss:.4f} in the last"
    if m.validation_loss is not None:
        text = "loss {:.4f}" if m.has_own_loss else "{:.4f} nats a token"
        yield "validation", text.format(m.validation_loss)
    own = {key: value for key, value in m.results.items() if "." in key and value is not None}
    for line in results_text(own):
        label, _, text = line.partition(" ")
        yield label, text


def _speed_rows(m: Measurement) -> Iterator[tuple[str, str]]:
    pace, rate = m.pace, m.tokens_per_second
    left_out = min(pace.steps, pace.warmup_steps)
    if rate is None:
        why = "warmup" if not pace.untimed_steps else "warmup or measured otherwise"
        yield "speed", f"not known: {count_text(pace.steps, 'step')}, all {why}"
        return
    many = f"on all ranks, {format_count(rate / m.world_size)} per rank"
    yield "speed", f"{format_count(rate)} tokens/s {many if m.world_size > 1 else 'on the one rank'}"
    if text := format_trained_token_share(pace.trained_share):
        yield "", f"{text}: the labels of the others do not count"
    slowed = f" and {count_text(pace.untimed_steps, 'profiled step')}" if pace.untimed_steps else ""
    warmup = count_text(left_out, "warmup step")
    yield "", f"over {count_text(pace.timed_steps, 'step')}; left out: {warmup}{slowed}"
    step, data = pace.seconds / pace.timed_steps, pace.data_seconds / pace.timed_steps
    yield "step", f"{format_seconds(step)}, of these {format_seconds(data)} waiting for data"
    if m.mfu is not None and m.peak is not None:
        whence = "by its datasheet" if m.peak.source == "catalog" else "a matmul measured here"
        peak = f"{_format_flop_count(m.peak.flops_per_second)}/s per rank"
        yield "MFU", f"{100 * m.mfu:.1f} % of {peak} ({m.peak.device}, {m.peak.dtype}, {whence})"


def _format_flop_count(count: float) -> str:
    """Returns a FLOP count with its unit: `1.02e11` -> `102 GFLOP`."""
    text = format_decimal(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"
