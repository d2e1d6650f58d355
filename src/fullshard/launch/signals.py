"""The signals that the launcher got, noted by handlers that do nothing else."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C may arrive twice: from the terminal, and from what stands between it and us (uv run, timeout).
_SAME_CTRL_C_SECONDS = 0.5


class Signals:
    """While the context is open, SIGINT, SIGTERM and SIGHUP are noted, and end nothing."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, float]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # What was ignored stays ignored: nohup, and a shell's background jobs.
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
        """The first one, None if there was none."""
        return signal.Signals(self._noted[0][0]) if self._noted else None

    @property
    def interrupted_twice(self) -> bool:
        """Whether another SIGINT came after the first signal: whoever is there does not want to wait."""
        later = self._noted[1:]
        return any(
            number == signal.SIGINT and at > self._noted[0][1] + _SAME_CTRL_C_SECONDS for number, at in later
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, time.monotonic()))
