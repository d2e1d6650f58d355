"""Receivers of the error with which a watchdog ends this process. No torch: every rank imports it first."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from fullshard.errors import TrainError

Receiver = Callable[[TrainError], object]

_RECEIVERS: list[Receiver] = []


@contextmanager
def on_watchdog_exit(receiver: Receiver) -> Generator[None]:
    """Has a watchdog call `receiver` with the error before it ends this process, while open."""
    _RECEIVERS.append(receiver)
    try:
        yield
    finally:
        _RECEIVERS.remove(receiver)


def receivers() -> tuple[Receiver, ...]:
    """Returns the receivers of all open `on_watchdog_exit` contexts."""
    return tuple(_RECEIVERS)
