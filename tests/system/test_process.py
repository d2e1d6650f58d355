"""The load of a machine is a fraction of its processors, without those of the processes that measure it."""

import pytest

from fullshard.system.process import ProcessorSeconds, busy_processor_fraction, other_programs_fraction


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
