"""Recording of signals, for a loop that handles them between its steps."""

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
class RecordedSignals:
    """Signals and their times (of `time.monotonic`), in the order of arrival."""

    arrivals: list[tuple[signal.Signals, float]] = field(default_factory=list[tuple[signal.Signals, float]])

    @property
    def first_signal(self) -> signal.Signals | None:
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def is_interrupted_twice(self) -> bool:
        """True if a SIGINT followed over half a second after the first signal: the user will not wait."""
        interrupts = [at for number, at in self.arrivals[1:] if number == signal.SIGINT]
        return any(at > self.arrivals[0][1] + _SAME_CTRL_C_SECONDS for at in interrupts)


@contextmanager
def record_signals(
    *numbers: signal.Signals, raise_second_interrupt: bool = False
) -> Generator[RecordedSignals]:
    """Context in which the signals `numbers` are recorded in the value that it yields, and do nothing else.

    raise_second_interrupt: a second SIGINT raises KeyboardInterrupt

    Signals that the process already ignores (under nohup, in a shell's background jobs) are not recorded, nor
    are any outside the main thread, where Python allows no handlers.
    """
    signals = RecordedSignals()

    def record_signal(number: int, frame: FrameType | None) -> None:
        signals.arrivals.append((signal.Signals(number), time.monotonic()))
        if number == signal.SIGINT and raise_second_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, record_signal) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
