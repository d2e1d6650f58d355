"""The signals that the launcher received. The handlers only record them."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may arrive twice: from the terminal, and from a process in between (uv run, timeout).
_SAME_CTRL_C_SECONDS = 0.5


class Signals:
    """Context in which SIGINT, SIGTERM and SIGHUP are only recorded."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, float]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Ignored signals stay ignored: under nohup, and in a shell's background jobs.
        heard = [number for number in _HEARD if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def first(self) -> signal.Signals | None:
        """The first signal, or None."""
        return signal.Signals(self._noted[0][0]) if self._noted else None

    @property
    def interrupted_twice(self) -> bool:
        """Returns whether another SIGINT came after the first signal: the user does not want to wait."""
        later = self._noted[1:]
        return any(
            number == signal.SIGINT and at > self._noted[0][1] + _SAME_CTRL_C_SECONDS for number, at in later
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, time.monotonic()))
