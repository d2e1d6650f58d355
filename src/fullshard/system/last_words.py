"""Who gets the error that a watchdog ends this process with. No torch: every rank imports it first."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from fullshard.errors import TrainError

Receiver = Callable[[TrainError], object]

_RECEIVERS: list[Receiver] = []


@contextmanager
def on_watchdog_exit(receiver: Receiver) -> Generator[None]:
    """Within it, `receiver` gets the error that a watchdog is about to end this process with."""
    _RECEIVERS.append(receiver)
    try:
        yield
    finally:
        _RECEIVERS.remove(receiver)


def receivers() -> tuple[Receiver, ...]:
    """Returns those of every `on_watchdog_exit` that is open."""
    return tuple(_RECEIVERS)
