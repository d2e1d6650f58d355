"""Progress display of tokenization: a bar on a terminal, otherwise a line every few seconds."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.system.terminal import printable

_LINE_SECONDS = 10.0


class TokenizationProgress:
    """Counts of the finished work. `add` may be called from any thread, but only by one at a time.

    name: name of the source
    total_bytes: size of the source
    bytes, tokens, skipped: bytes read, tokens made and records left out so far
    """

    def __init__(
        self,
        name: str,
        *,
        total_bytes: int,
        show: Callable[["TokenizationProgress"], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.total_bytes, self._show, self._now = name, total_bytes, show, now
        self.bytes = self.tokens = self.skipped = 0
        self._started = now()

    def add(self, size: int, *, tokens: int, skipped: int = 0) -> None:
        """Records that `size` bytes of the source became `tokens` tokens."""
        self.bytes += size
        self.tokens += tokens
        self.skipped += skipped
        self._show(self)

    @property
    def seconds(self) -> float:
        return self._now() - self._started

    def text(self) -> str:
        """Returns the progress as text, without the remaining time, which the bar shows itself."""
        rate = f", {format_count(self.tokens / self.seconds)} tokens/s" if self.seconds > 0 else ""
        skipped = f", {self.skipped} records left out" if self.skipped else ""
        of = f"{format_bytes(self.bytes)} of {format_bytes(self.total_bytes)}"
        return f"{format_count(self.tokens)} tokens from {of}{rate}{skipped}"


@contextmanager
def making(name: str, *, total_bytes: int, file: TextIO) -> Generator[TokenizationProgress]:
    """Shows the progress of tokenizing `name` on `file` while the block runs."""
    terminal = file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    with _bar(name, total_bytes, file=file) if terminal else _lines(name, total_bytes, file=file) as shown:
        yield shown


@contextmanager
def _bar(name: str, total_bytes: int, *, file: TextIO) -> Generator[TokenizationProgress]:
    columns = (TextColumn("{task.fields[name]}"), BarColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=file, force_terminal=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=max(total_bytes, 1), name=printable(name), text="")
        yield TokenizationProgress(
            name,
            total_bytes=total_bytes,
            show=lambda shown: bar.update(task, completed=shown.bytes, text=shown.text()),
        )


@contextmanager
def _lines(name: str, total_bytes: int, *, file: TextIO) -> Generator[TokenizationProgress]:
    last = 0.0

    def show(shown: TokenizationProgress) -> None:
        nonlocal last
        if shown.seconds - last >= _LINE_SECONDS:
            last = shown.seconds
            left = (shown.total_bytes - shown.bytes) * shown.seconds / max(shown.bytes, 1)
            say(f"{name}: {shown.text()}, {format_seconds(max(left, 1.0))} left")

    def say(text: str) -> None:
        with suppress(OSError):  # the reader may have closed the pipe
            print(printable(text), file=file, flush=True)

    shown = TokenizationProgress(name, total_bytes=total_bytes, show=show)
    yield shown
    say(f"{name}: {shown.text()}, in {format_seconds(shown.seconds)}")
