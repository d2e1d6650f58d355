"""What the files of a run that is over hold, for one who does not go on from them."""

from dataclasses import dataclass
from pathlib import Path

from fullshard.offload.directories import FIRST_RANK, RANKS, disk_usage
from fullshard.offload.generation_manifest import read_world_size, sound_manifests


@dataclass(frozen=True)
class SavedRunState:
    """`step`: the newest that is whole on all of the run's ranks whose files lie in `directory`, which on
    drives of several nodes are a node's. `world_size`: how many ranks the run had."""

    directory: Path
    step: int
    world_size: int
    taken_bytes: int


def find_saved_state(directory: Path) -> SavedRunState | None:
    """Of a run's directory, `<offload.path>/<run id>`; None where no step is whole that a run can go on from.

    Records are not held against their digests. Files of other ranks than its first rank's run had are left
    over from before, and say nothing. None also where this user cannot read them.
    """
    try:
        return _held(directory)
    except OSError:
        return None


def _held(directory: Path) -> SavedRunState | None:
    world_size = read_world_size(directory / FIRST_RANK)
    own = [one for one in directory.glob(RANKS) if read_world_size(one) == world_size]
    if world_size is None or not own:
        return None
    # Without a payload it is a state in mid-load, which nothing goes on from.
    steps = [{one.step for one in sound_manifests(rank) if one.payload_bytes} for rank in own]
    step = max(set[int].intersection(*steps), default=None)
    return (
        None
        if step is None
        else SavedRunState(directory, step, world_size, sum(disk_usage(one) for one in own))
    )
