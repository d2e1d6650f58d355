"""Each call to the operating system in turn fails, or is the last one of its process or its machine.

In `make test`, every third call.
"""

import pytest

from tests.faults.calls import ANY_ERROR, KILL, NOTHING, SHORT
from tests.faults.sweeps import LOST_WRITES, SWEEPS, apart, sweep_of_full_logs

SAVE, BACKGROUND = "a save that removes an older one", "a save in the background"
DRIVE = "a start on a drive, a generation"
# Beside errors at each call.
HERE = [(SAVE, SHORT), (DRIVE, SHORT), (SAVE, NOTHING), (DRIVE, NOTHING)]
HERE += [(SAVE, KILL), (DRIVE, KILL), ("a removal from a drive", KILL)]
HERE += [(one, ANY_ERROR) for one in SWEEPS if one != BACKGROUND]
EACH = [*HERE, (BACKGROUND, ANY_ERROR), (BACKGROUND, KILL), ("the first save", KILL)]


@pytest.mark.parametrize(
    ("what", "how", "stride"),
    [(*one, 3) for one in HERE] + [pytest.param(*one, 1, marks=pytest.mark.long) for one in EACH],
)
def test_at_whichever_call_it_happens_nothing_acknowledged_is_lost(what: str, how: str, stride: int) -> None:
    assert apart(SWEEPS[what], how, stride) > 0


def test_a_log_that_may_not_grow_is_an_error_at_whichever_byte() -> None:
    assert apart(sweep_of_full_logs) > 100


@pytest.mark.parametrize("samples", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", LOST_WRITES)
def test_whichever_unflushed_writes_a_power_cut_loses_what_was_acknowledged_loads(
    what: str, samples: int
) -> None:
    assert apart(LOST_WRITES[what], samples) > 100
