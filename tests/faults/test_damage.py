"""Whatever happens to a file, the next start goes on from right numbers."""

import random

import pytest

from tests.checkpoint.states import saved_sharded
from tests.faults.damage import ACTS, FILES, damaged_start

TIMES_HERE = 2


@pytest.mark.parametrize("act", ACTS)
def test_no_damage_is_loaded(ranks, tmp_path, act):
    for step in (1, 2):
        ranks(2).run(saved_sharded, tmp_path / "sound", step, (2,))
    rng = random.Random(act)
    for files in FILES:
        for trial in range(TIMES_HERE):
            outcome = damaged_start(
                tmp_path / "sound", tmp_path / f"{trial}{files[-4:]}", act=act, files=files, rng=rng
            )
            assert outcome == "nothing changed" or outcome.startswith("resumed")
