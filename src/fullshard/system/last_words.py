"""Callbacks for the error with which a watchdog ends this process. No torch: every rank imports it first."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from fullshard.errors import TrainError

Receiver = Callable[[TrainError], object]

_RECEIVERS: list[Receiver] = []


@contextmanager
def call_on_watchdog_exit(receiver: Receiver) -> Generator[None]:
    """Context in which a watchdog calls `receiver` with the error before the watchdog ends this process."""
    _RECEIVERS.append(receiver)
    try:
        yield
    finally:
        _RECEIVERS.remove(receiver)


def watchdog_exit_receivers() -> tuple[Receiver, ...]:
    """Returns the receivers of all open `call_on_watchdog_exit` contexts."""
    return tuple(_RECEIVERS)
