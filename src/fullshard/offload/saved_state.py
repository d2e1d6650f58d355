"""Offloaded state that a finished run has left on a drive, for runs that do not resume from it."""

from dataclasses import dataclass
from pathlib import Path

from fullshard.offload.directories import FIRST_RANK, RANKS, disk_usage
from fullshard.offload.generation_manifest import read_world_size, sound_manifests


@dataclass(frozen=True)
class SavedRunState:
    """State that a run left on a drive.

    directory: the run's directory; with drives on several nodes, one node's
    step: newest step that is complete on all of the run's ranks with files in `directory`
    world_size: number of ranks of the run
    taken_bytes: size of these ranks' files on the drive
    """

    directory: Path
    step: int
    world_size: int
    taken_bytes: int


def find_saved_state(directory: Path) -> SavedRunState | None:
    """Finds the state in a run's directory, `<offload.path>/<run id>`.

    Returns None if no step is complete that a run can resume from, or if this user cannot read the files.
    Records are not checked against their digests. Ranks whose world size differs from the first rank's are
    leftovers of an earlier run, and are ignored.
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
    # A state without a payload is one during a load, from which no run resumes.
    steps = [{one.step for one in sound_manifests(rank) if one.payload_bytes} for rank in own]
    step = max(set[int].intersection(*steps), default=None)
    return (
        None
        if step is None
        else SavedRunState(directory, step, world_size, sum(disk_usage(one) for one in own))
    )
