"""Progress display of tokenization: a bar on a terminal, otherwise a line every few seconds."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.system.terminal import escape_control_characters, is_live_terminal

_LINE_SECONDS = 10.0


class TokenizationProgress:
    """Counts the finished part of a tokenization, and calls `print_progress_if_due` after each addition.

    total_bytes: size of the source
    bytes, tokens, skipped: bytes read, tokens made and records left out so far
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.print_progress_if_due: Callable[[], object] = lambda: None
        self.bytes = self.tokens = self.skipped = 0
        self._started = time.monotonic()

    def add_finished_work(self, size: int, *, tokens: int, skipped: int) -> None:
        """Adds a finished part: `size` bytes of the source, its tokens, and the records `skipped` in it."""
        self.bytes += size
        self.tokens += tokens
        self.skipped += skipped
        self.print_progress_if_due()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def counts_and_rate_text(self) -> str:
        """Returns the counts and the rate as text, without the remaining time."""
        seconds = self.elapsed_seconds
        rate = f", {format_count(self.tokens / seconds)} tokens/s" if seconds > 0 else ""
        skipped = f", {self.skipped} records left out" if self.skipped else ""
        of = f"{format_bytes(self.bytes)} of {format_bytes(self.total_bytes)}"
        return f"{format_count(self.tokens)} tokens from {of}{rate}{skipped}"


@contextmanager
def show_tokenization_progress(
    name: str, *, total_bytes: int, file: TextIO
) -> Generator[TokenizationProgress]:
    """Shows the progress of tokenizing the source `name` on the stream `file` while the block runs."""
    progress = TokenizationProgress(total_bytes)
    show = _show_progress_bar if is_live_terminal(file) else _print_progress_lines
    with show(name, progress, file=file):
        yield progress


@contextmanager
def _show_progress_bar(name: str, progress: TokenizationProgress, *, file: TextIO) -> Generator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[name]}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
    )
    console = Console(file=file, force_terminal=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        total = max(progress.total_bytes, 1)
        task = bar.add_task("", total=total, name=escape_control_characters(name), text="")
        progress.print_progress_if_due = lambda: bar.update(
            task, completed=progress.bytes, text=progress.counts_and_rate_text()
        )
        yield


@contextmanager
def _print_progress_lines(name: str, progress: TokenizationProgress, *, file: TextIO) -> Generator[None]:
    last = 0.0

    def print_progress_if_due() -> None:
        nonlocal last
        if progress.elapsed_seconds - last >= _LINE_SECONDS:
            last = progress.elapsed_seconds
            left = (progress.total_bytes - progress.bytes) * progress.elapsed_seconds / max(progress.bytes, 1)
            print_line(f"{name}: {progress.counts_and_rate_text()}, {format_seconds(max(left, 1.0))} left")

    def print_line(text: str) -> None:
        with suppress(OSError):  # the reader may have closed the pipe
            print(escape_control_characters(text), file=file, flush=True)

    progress.print_progress_if_due = print_progress_if_due
    yield
    print_line(f"{name}: {progress.counts_and_rate_text()}, in {format_seconds(progress.elapsed_seconds)}")
