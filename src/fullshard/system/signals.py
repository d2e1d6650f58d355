"""Signals that are only recorded, for a loop that acts on them between two of its steps."""

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

# One Ctrl-C may arrive twice: from the terminal, and from a process in between (uv run, timeout).
_SAME_CTRL_C_SECONDS = 0.5


@dataclass
class NotedSignals:
    """Signals and their times, in the order of arrival."""

    noted: list[tuple[signal.Signals, float]] = field(default_factory=list[tuple[signal.Signals, float]])

    @property
    def first(self) -> signal.Signals | None:
        return self.noted[0][0] if self.noted else None

    @property
    def interrupted_twice(self) -> bool:
        """True if another SIGINT came after the first signal: the user does not want to wait."""
        return any(
            number == signal.SIGINT and at > self.noted[0][1] + _SAME_CTRL_C_SECONDS
            for number, at in self.noted[1:]
        )


@contextmanager
def note_signals(*numbers: signal.Signals, raise_second_interrupt: bool = False) -> Generator[NotedSignals]:
    """Context in which these signals are only recorded.

    raise_second_interrupt: a second SIGINT raises KeyboardInterrupt

    Ignored signals stay ignored: under nohup, and in a shell's background jobs. Outside the main thread,
    where Python allows no handlers, nothing is recorded.
    """
    signals = NotedSignals()

    def note(number: int, frame: FrameType | None) -> None:
        signals.noted.append((signal.Signals(number), time.monotonic()))
        if number == signal.SIGINT and raise_second_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
