"""Broken and hostile inputs work or are refused: no other error, no dead process, no attack that runs."""

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

INPUTS = 250  # `make fuzz` tries 10,000
SEED = 1
HANGS_AFTER_SECONDS = 60.0  # of the processor: that an input ends at all, and not how fast


def test_mutated_inputs_work_or_are_refused():
    found = fuzz(inputs=INPUTS, seed=SEED, targets=list(TARGETS), limit_seconds=HANGS_AFTER_SECONDS)
    assert not found.violations, "\n".join(map(str, found.violations))
    assert found.worked > INPUTS / 20  # the inputs are nearly right
    assert found.refused > INPUTS / 3
