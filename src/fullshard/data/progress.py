"""Progress of tokenization: a line every few seconds, and one at the end."""

import time
from contextlib import suppress
from typing import TextIO

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.system.terminal import escape_control_characters

_LINE_SECONDS = 10.0


class TokenizationProgress:
    """Counts the finished part of a tokenization, and prints it to `file` every few seconds.

    name: name of the source
    total_bytes: size of the source
    """

    def __init__(self, name: str, total_bytes: int, *, file: TextIO) -> None:
        self._name, self._total_bytes, self._file = name, total_bytes, file
        self._bytes = self._tokens = self._skipped = 0
        self._started = self._printed = time.monotonic()

    def add_finished_work(self, size: int, *, tokens: int, skipped: int) -> None:
        """Adds a finished part: `size` bytes of the source, its tokens, and the records `skipped` in it."""
        self._bytes += size
        self._tokens += tokens
        self._skipped += skipped
        now = time.monotonic()
        if now - self._printed >= _LINE_SECONDS:
            self._printed = now
            left = (self._total_bytes - self._bytes) * (now - self._started) / max(self._bytes, 1)
            self._print_counts(f"{format_seconds(max(left, 1.0))} left")

    def print_end(self) -> None:
        """Prints the counts with the seconds that the tokenization took."""
        self._print_counts(f"in {format_seconds(time.monotonic() - self._started)}")

    def _print_counts(self, end: str) -> None:
        """Prints the counts and the rate, and then `end`; nothing if the reader has closed the pipe."""
        seconds = time.monotonic() - self._started
        rate = f", {format_count(self._tokens / seconds)} tokens/s" if seconds > 0 else ""
        skipped = f", {self._skipped} records left out" if self._skipped else ""
        of = f"{format_bytes(self._bytes)} of {format_bytes(self._total_bytes)}"
        text = f"{self._name}: {format_count(self._tokens)} tokens from {of}{rate}{skipped}, {end}"
        with suppress(OSError):
            print(escape_control_characters(text), file=self._file, flush=True)
