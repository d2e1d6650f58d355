"""Progress is a few plain lines."""

import io
import os
from typing import TextIO

import pytest

from fullshard.observe.progress import ProgressPrinter, RunProgress
from fullshard.observe.step_metrics import StepMetrics


def metrics(
    step: int,
    *,
    seconds: float = 0.5,
    skipped: bool = False,
    compiling: float | None = None,
    trained: int = 100,
) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=2.5,
        grad_norm=1.25,
        learning_rate=1e-3,
        tokens=100,
        trained_tokens=trained,
        seconds=seconds,
        compile_seconds=compiling,
        skipped=skipped,
        mfu=0.4,
        peak_bytes=3 * 2**30,
    )


def progress(steps: int, *, every: int, world_size: int = 1, file: TextIO) -> ProgressPrinter:
    return ProgressPrinter(RunProgress(steps=steps, world_size=world_size), every=every, file=file)


def test_lines_are_few():
    file = io.StringIO()
    shown = progress(95, every=20, world_size=2, file=file)
    for step in range(1, 96):
        shown.add_step_and_show_if_due(metrics(step))
    shown.print_line("saved")
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/95", "20/95", "40/95", "60/95", "80/95", "95/95"]
    assert lines[-1] == "saved"
    assert "200 tokens/s = 2 x 100" in lines[1]
    assert "MFU 40.0 %" in lines[1]
    assert "peak 3.00 GiB" in lines[1]
    assert "loss on" not in lines[1], "as it is on all tokens"


def test_masked_labels_do_not_lower_the_speed():
    course = RunProgress(steps=10, world_size=1)
    course.add_step(metrics(1, trained=20))
    parts = course.status_line_parts()
    assert "200 tokens/s" in parts
    assert "loss on 20.0 % of the tokens" in parts


def test_skipped_step_is_shown_at_once():
    file = io.StringIO()
    shown = progress(95, every=20, file=file)
    for step in range(1, 10):
        shown.add_step_and_show_if_due(metrics(step, skipped=step == 7))
    assert "SKIPPED" in file.getvalue().splitlines()[1]


def test_a_reader_that_has_left_does_not_end_the_run():
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    shown = progress(3, every=1, file=file)
    shown.add_step_and_show_if_due(metrics(1))
    shown.print_line("saved")
    with pytest.raises(BrokenPipeError):
        file.close()


def test_the_time_left_follows_the_clock_on_the_wall():
    now = 0.0
    course = RunProgress(steps=10, world_size=1, now=lambda: now)
    course.add_step(metrics(1, seconds=0.5))
    assert course.seconds_left == 9 * 0.5
    now = 3.0  # 0.5 s of step, 2.5 s of saving
    course.add_step(metrics(2, seconds=0.5))
    assert course.seconds_left == 8 * 3.0
    assert course.recent_tokens_per_second == 200


def test_speed_and_time_left_are_those_without_compiling():
    now = 0.0
    course = RunProgress(steps=10, world_size=1, now=lambda: now)
    for step, seconds, compiling in ((1, 30.5, 30.0), (2, 8.5, 8.0), (3, 0.5, None)):
        now += seconds
        course.add_step(metrics(step, seconds=seconds, compiling=compiling))
        assert course.seconds_left == pytest.approx((10 - step) * 0.5)
        assert course.recent_tokens_per_second == pytest.approx(200)
