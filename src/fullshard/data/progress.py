"""Progress display of tokenization: a bar on a terminal, otherwise a line every few seconds."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.system.terminal import printable

_LINE_SECONDS = 10.0


class TokenizationProgress:
    """Counts the finished part of a tokenization, and calls `show` after each addition.

    total_bytes: size of the source
    bytes, tokens, skipped: bytes read, tokens made and records left out so far
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.show: Callable[[], object] = lambda: None
        self.bytes = self.tokens = self.skipped = 0
        self._started = time.monotonic()

    def add(self, size: int, *, tokens: int, skipped: int) -> None:
        """Adds a finished part: `size` bytes of the source, its tokens, and the records `skipped` in it."""
        self.bytes += size
        self.tokens += tokens
        self.skipped += skipped
        self.show()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def text(self) -> str:
        """Returns the counts and the rate as text, without the remaining time."""
        rate = f", {format_count(self.tokens / self.seconds)} tokens/s" if self.seconds > 0 else ""
        skipped = f", {self.skipped} records left out" if self.skipped else ""
        of = f"{format_bytes(self.bytes)} of {format_bytes(self.total_bytes)}"
        return f"{format_count(self.tokens)} tokens from {of}{rate}{skipped}"


@contextmanager
def show_progress(name: str, *, total_bytes: int, file: TextIO) -> Generator[TokenizationProgress]:
    """Shows the progress of tokenizing the source `name` on the stream `file` while the block runs."""
    progress = TokenizationProgress(total_bytes)
    terminal = file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    with _bar(name, progress, file=file) if terminal else _lines(name, progress, file=file):
        yield progress


@contextmanager
def _bar(name: str, progress: TokenizationProgress, *, file: TextIO) -> Generator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.fields[name]}"), BarColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=file, force_terminal=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=max(progress.total_bytes, 1), name=printable(name), text="")
        progress.show = lambda: bar.update(task, completed=progress.bytes, text=progress.text())
        yield


@contextmanager
def _lines(name: str, progress: TokenizationProgress, *, file: TextIO) -> Generator[None]:
    last = 0.0

    def show() -> None:
        nonlocal last
        if progress.seconds - last >= _LINE_SECONDS:
            last = progress.seconds
            left = (progress.total_bytes - progress.bytes) * progress.seconds / max(progress.bytes, 1)
            say(f"{name}: {progress.text()}, {format_seconds(max(left, 1.0))} left")

    def say(text: str) -> None:
        with suppress(OSError):  # the reader may have closed the pipe
            print(printable(text), file=file, flush=True)

    progress.show = show
    yield
    say(f"{name}: {progress.text()}, in {format_seconds(progress.seconds)}")
