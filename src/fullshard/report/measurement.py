"""Short table after a run: its Measurement, beside its prediction if there is one."""

from collections.abc import Iterator
from textwrap import indent
from typing import TextIO

from fullshard.quantities import format_bytes, format_count, format_seconds, format_trained_share
from fullshard.report.comparison import CRUMB_BYTES, compare_prediction, show_comparison
from fullshard.report.plan import drive_traffic_lines, term_label
from fullshard.report.table import show_labelled_lines
from fullshard.spec.measurement import Measurement, PeakBytes, StepSeconds
from fullshard.spec.prediction import Prediction
from fullshard.system.terminal import escape_control_characters


def show_measurement(
    measurement: Measurement, *, prediction: Prediction | None = None, file: TextIO | None = None
) -> None:
    """Prints the measurement as a table to `file` (standard output by default).

    With a `prediction`, a second table compares bytes and seconds with the predicted ones, term by term.
    """
    show_labelled_lines(measurement_rows(measurement, prediction=prediction), file=file)
    if prediction is not None:
        print(file=file)
        show_comparison(compare_prediction(prediction, measurement), file=file)
    if measurement.sample is not None:
        sample = indent(escape_control_characters(measurement.sample), "    ")
        print(f"\nsample of the generated text\n\n{sample}", file=file)


def measurement_rows(
    measurement: Measurement, *, prediction: Prediction | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines of what was measured, without figures that the table of `prediction` has."""
    m = measurement
    ranks = f"{m.world_size} rank{'s' if m.world_size > 1 else ''}"
    yield "run", f"{m.directory}: {m.strategy} on {ranks} ({m.device})"
    if m.offload is not None:
        yield "offload", m.offload
        if prediction is not None and prediction.offload is not None and prediction.offload.disk_bytes:
            held = format_bytes(prediction.offload.disk_bytes)
            yield "", f"predicted: {held} of the drive per rank"
            yield from (("", line) for line in drive_traffic_lines(prediction))
        elif m.drive is not None:
            moved = f"reads {format_bytes(m.drive.read)} and writes {format_bytes(m.drive.written)}"
            yield "", f"each step {moved} of the drive, per rank"
    if not m.pace.steps:
        yield "steps", f"none: {m.last_step} were done before"
        return
    yield "steps", f"{m.first_step} to {m.last_step}, {m.skipped_steps} skipped"
    yield from _loss_rows(m)
    yield from _speed_rows(m)
    if m.step_seconds is not None and prediction is None:
        yield from _step_time_rows(m.step_seconds)
    if m.startup_seconds is not None:
        yield "first step", f"done {format_seconds(m.startup_seconds)} after the command"
    if m.compilation is not None:
        yield "compiled", m.compilation.format_text()
    if m.peak_bytes is not None and prediction is None:
        yield from _peak_memory_rows(m.peak_bytes)
    if m.checkpoint is not None:
        yield "checkpoint", m.checkpoint


def _loss_rows(m: Measurement) -> Iterator[tuple[str, str]]:
    if m.first_loss is not None and m.last_loss is not None:
        yield "loss", f"{m.first_loss:.4f} in the first step, {m.last_loss:.4f} in the last"
    if m.validation_loss is not None:
        share = ""
        if m.byte_entropy:
            ratio = m.validation_loss / m.byte_entropy
            share = f" = {ratio:.3f} of the entropy of the byte frequencies ({m.byte_entropy:.4f})"
        yield "validation", f"{m.validation_loss:.4f} nats a token{share}"


def _speed_rows(m: Measurement) -> Iterator[tuple[str, str]]:
    pace, rate = m.pace, m.tokens_per_second
    left_out = min(pace.steps, pace.warmup_steps)
    if rate is None:
        why = "were warmup" if not pace.untimed_steps else "were warmup or measured otherwise"
        yield "speed", f"not known: all {pace.steps} steps {why}"
        return
    many = f"on all ranks, {format_count(rate / m.world_size)} per rank"
    yield "speed", f"{format_count(rate)} tokens/s {many if m.world_size > 1 else 'on the one rank'}"
    if text := format_trained_share(pace.trained_share):
        yield "", f"{text}: the labels of the others do not count"
    slowed = f", and {pace.untimed_steps} that were profiled" if pace.untimed_steps else ""
    yield "", f"over {pace.timed_steps} steps, the {left_out} warmup steps before them left out{slowed}"
    step, data = pace.seconds / pace.timed_steps, pace.data_seconds / pace.timed_steps
    yield "step", f"{format_seconds(step)}, of these {format_seconds(data)} waiting for data"
    if m.mfu is not None and m.peak is not None:
        whence = "by its datasheet" if m.peak.source == "catalog" else "a matmul measured here"
        peak = f"{_format_flop_count(m.peak.flops_per_second)}/s per rank"
        yield "MFU", f"{100 * m.mfu:.1f} % of {peak} ({m.peak.device}, {m.peak.dtype}, {whence})"


def _step_time_rows(step: StepSeconds) -> Iterator[tuple[str, str]]:
    for name, seconds in step.terms().items():
        if seconds:
            share = f"{100 * seconds / step.total:.1f} %"
            yield f"  {term_label(name)}", f"{format_seconds(seconds)}, {share}"


def _peak_memory_rows(peak: PeakBytes) -> Iterator[tuple[str, str]]:
    yield "memory", f"{format_bytes(peak.total)} at the peak of the fullest rank"
    for name, count in peak.parts().items():
        if count > CRUMB_BYTES * peak.total:
            yield f"  {term_label(name)}", format_bytes(count)
    if peak.host is not None:
        yield "host memory", f"{format_bytes(peak.host)} more per rank, for the offload target"
    cuda = [("active", peak.active), ("allocated", peak.allocated), ("reserved", peak.reserved)]
    counted = [f"{label} {format_bytes(count)}" for label, count in cuda if count is not None]
    if counted:
        yield "  CUDA", ", ".join(counted)


def _format_flop_count(count: float) -> str:
    """Returns a FLOP count with its unit: `1.02e11` -> `102 GFLOP`."""
    text = format_count(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"
