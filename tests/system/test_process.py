"""Signals are recorded while the context is open."""

import os
import signal
from collections.abc import Iterator

import pytest

from fullshard.system.process import record_signals


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, which `record_signals` leaves as it is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_handlers_are_as_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with record_signals(number) as signals:
        assert signals.first_signal is None
        os.kill(os.getpid(), number)
        assert signals.first_signal is number
    assert signal.getsignal(number) is before


def test_sigterm_may_come_again_but_a_second_ctrl_c_is_meant() -> None:
    with record_signals(signal.SIGTERM, signal.SIGINT, raise_second_sigint=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.first_signal is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
