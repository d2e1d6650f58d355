"""After any damage to a file, the next start resumes from right numbers."""

import random
from pathlib import Path

import pytest

from tests.checkpoint.states import saved_sharded
from tests.faults.damage import ACTS, FILES, damaged_start


@pytest.fixture(scope="module")
def sound(ranks, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "sound"
    for step in (1, 2):
        ranks(2).run(saved_sharded, directory, step, (2,))
    return directory


@pytest.mark.parametrize("times", [2, pytest.param(9, marks=pytest.mark.long)])
@pytest.mark.parametrize("act", ACTS)
def test_no_damage_is_loaded(sound, tmp_path, act, times):
    rng = random.Random(act)
    for files in FILES:
        for trial in range(times):
            outcome = damaged_start(sound, tmp_path / f"{trial}{files[-4:]}", act=act, files=files, rng=rng)
            assert outcome == "nothing changed" or outcome.startswith("resumed")
