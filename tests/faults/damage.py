"""Files that are not what was saved: flipped, cut off, zeroed, exchanged, gone."""

import random
import shutil
from pathlib import Path

from fullshard.checkpoint.load import iterate_damage
from fullshard.errors import CheckpointError
from tests.checkpoint.states import assert_same, loaded, numbers
from tests.faults.crowd import litter

# What is said of each, by how the file looks to who reads it.
FILES = ["*.distcp", "shards.json", ".metadata", "manifest.json", "writer.json"]
ACTS = ["flip a bit", "truncate", "zero a part", "delete", "append", "exchange for another step's"]


def damage(path: Path, older: Path, *, act: str, files: str, rng: random.Random) -> str:
    """Damages one file of the checkpoint `path`; returns which, and where."""
    file = rng.choice(sorted(path.glob(files)))
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if act == "flip a bit":
        data[at] ^= 1 << rng.randrange(8)
    elif act == "truncate":
        del data[at:]
    elif act == "zero a part":
        stop = min(at + 512, len(data))
        data[at:stop] = bytes(stop - at)
    elif act == "append":
        data += b"\0" * rng.randrange(1, 99)
    elif act == "exchange for another step's":
        data = bytearray((older / file.name).read_bytes())
    unchanged = act != "delete" and bytes(data) == file.read_bytes()
    if act == "delete":
        file.unlink()
    else:
        file.write_bytes(data)
    return "" if unchanged else f"{file.name} at {at}"


def damaged_start(sound: Path, directory: Path, *, act: str, files: str, rng: random.Random) -> str:
    """Damages the newer of steps 1 and 2 in a copy of `sound`, and loads. Returns the outcome.

    Raises AssertionError if the load accepts wrong numbers, or `verify` sees no damage.
    """
    shutil.copytree(sound, directory)
    litter(directory)
    newer, older = directory / "step-00000002", directory / "step-00000001"
    where = damage(newer, older, act=act, files=files, rng=rng)
    if not where:
        shutil.rmtree(directory)
        return "nothing changed"
    damages = list(iterate_damage(newer))
    assert damages, f"verify did not see {act} of {where}"
    assert act != "flip a bit" or {damage.file for damage in damages} == {where.split()[0]}
    # What this process does not read (another rank's random state, who wrote it) it does not verify either.
    unread = all(name.startswith("random.rank") for damage in damages for name in damage.tensors)
    try:
        state = loaded(directory)
        shown = {name: tensor for name, tensor in state.held.items() if ".rank" not in name}
        assert_same(shown, numbers(state.step))
        outcome = "resumed at the older step" if state.step == 1 else "resumed: not read"
        assert state.step == 1 or unread, f"{act} of {where} went unseen"
    except CheckpointError as error:
        outcome = f"stopped: {error.what}"
    shutil.rmtree(directory)
    return outcome
