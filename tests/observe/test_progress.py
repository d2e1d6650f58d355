"""Progress is one line of a terminal, which is given back as it was; elsewhere it is a few plain lines."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.observe.progress import Progress, RunProgress, StepMetrics, show_progress


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


class Terminal:
    """A pseudo-terminal: `file` is the end that a program writes to."""

    def __init__(self) -> None:
        self._screen, program = os.openpty()
        self.file: TextIO = os.fdopen(program, "w")

    def shown(self) -> str:
        """The text written since the last call."""
        self.file.write("<end>")  # the kernel brings it over when it likes, but in order
        self.file.flush()
        written = b""
        while not written.endswith(b"<end>"):
            written += os.read(self._screen, 1 << 16)
        return written.removesuffix(b"<end>").decode()

    def close(self) -> None:
        self.file.close()
        os.close(self._screen)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal()
    yield made
    made.close()


def cursor_is_visible(written: str) -> bool:
    return written.rfind("\x1b[?25h") >= written.rfind("\x1b[?25l")


@pytest.mark.parametrize("color", ["", "1"])
def test_off_a_terminal_lines_are_few(monkeypatch: pytest.MonkeyPatch, color: str):
    monkeypatch.setenv("FORCE_COLOR", color)
    file = io.StringIO()
    with show_progress(steps=95, every=20, world_size=2, file=file) as shown:
        for step in range(1, 96):
            shown.show_step_if_due(metrics(step))
        shown.print_line("saved")
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/95", "20/95", "40/95", "60/95", "80/95", "95/95"]
    assert lines[-1] == "saved"
    assert "\x1b" not in file.getvalue()
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
    with show_progress(steps=95, every=20, world_size=1, file=file) as shown:
        for step in range(1, 10):
            shown.show_step_if_due(metrics(step, skipped=step == 7))
    assert "SKIPPED" in file.getvalue().splitlines()[1]


def test_terminal_line_is_redrawn_below_messages(terminal: Terminal):
    with show_progress(steps=3, every=1, world_size=1, file=terminal.file) as shown:
        for step in (1, 2, 3):
            shown.show_step_if_due(metrics(step))
        shown.print_line("saved [step] 3")
    written = terminal.shown()
    assert "step 1/3" in written
    assert "step 3/3  loss 2.5000" in written
    assert written.rindex("saved [step] 3") < written.rindex("step 3/3")


@pytest.mark.parametrize("how", [ValueError(), KeyboardInterrupt(), SystemExit(75)])
def test_a_terminal_is_given_back_however_the_run_ends(terminal: Terminal, how: BaseException):
    before = sys.stdout, sys.stderr

    def run() -> None:
        with show_progress(steps=3, every=1, world_size=1, file=terminal.file) as shown:
            shown.show_step_if_due(metrics(1))
            raise how

    with pytest.raises(type(how)):
        run()
    assert (sys.stdout, sys.stderr) == before
    written = terminal.shown()
    assert cursor_is_visible(written)
    assert written.replace("\x1b[?25h", "").endswith("\n")  # what comes next starts on a line of its own


def test_a_run_that_is_killed_leaves_its_cursor(terminal: Terminal):
    line = Progress(RunProgress(steps=3, world_size=1), every=1, file=terminal.file)
    line.start()
    line.show_step_if_due(metrics(1))
    assert cursor_is_visible(terminal.shown())
    line.stop()


def test_quick_steps_are_not_all_drawn(terminal: Terminal):
    line = Progress(RunProgress(steps=20, world_size=1), every=1, file=terminal.file, now=lambda: 7.0)
    line.start()
    for step in range(1, 21):
        line.show_step_if_due(metrics(step))
    written = terminal.shown()
    assert [step for step in range(1, 21) if f"step {step}/20" in written] == [1, 20]
    line.stop()


def test_a_reader_that_has_left_does_not_end_the_run(tmp_path: Path):
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    with show_progress(steps=3, every=1, world_size=1, file=file) as shown:
        shown.show_step_if_due(metrics(1))
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


@given(width=st.integers(1, 150), world_size=st.integers(1, 1024), skipped=st.booleans())
def test_line_fits_and_begins_with_the_step(width: int, world_size: int, skipped: bool):
    course = RunProgress(steps=300, world_size=world_size)
    course.add_step(metrics(120, skipped=skipped))
    texts = course.status_line_parts(width=width)
    assert texts[0] == "step 120/300"
    assert len(texts) == 1 or len("  ".join(texts)) <= width
    assert set(texts) <= set(course.status_line_parts())
