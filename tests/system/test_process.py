"""Signals are recorded while the context is open; the load of a machine is a fraction of its processors."""

import os
import signal
from collections.abc import Iterator

import pytest

from fullshard.system.process import (
    ProcessorSeconds,
    busy_processor_fraction,
    other_programs_fraction,
    record_signals,
)


def test_the_load_is_a_fraction_of_the_processors():
    assert 0 <= busy_processor_fraction() <= 1


def test_the_load_by_others_excludes_the_measuring_processes():
    both = [ProcessorSeconds(machine=30, available=40, process=own) for own in (10, 12)]
    assert other_programs_fraction(both) == pytest.approx(8 / 40)
    assert other_programs_fraction(both * 2) == 0, "clocks differ a little"
    unknown = ProcessorSeconds(machine=0, available=0, process=3)
    assert other_programs_fraction([unknown]) == 0


def test_processor_seconds_grow_with_this_process():
    before = ProcessorSeconds.now()
    while (passed := ProcessorSeconds.now().since(before)).process < 0.1:
        pass
    assert 0 <= passed.machine <= passed.available


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
    with record_signals(signal.SIGTERM, signal.SIGINT, raise_second_interrupt=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.first_signal is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
