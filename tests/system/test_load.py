"""The load of a machine is a fraction of its processors, and a warning beside measurements names it."""

from fullshard.system.load import BUSY, busy_machine_text, busy_processor_fraction


def test_the_load_is_a_fraction_of_the_processors():
    assert 0 <= busy_processor_fraction() <= 1


def test_only_a_busy_machine_is_named():
    assert busy_machine_text(BUSY / 2) is None
    assert "60 % of the processors" in (busy_machine_text(0.6) or "")
