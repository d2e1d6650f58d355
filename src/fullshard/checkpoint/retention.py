"""Which old checkpoints are kept."""

import logging

from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import read_manifest_and_check_sizes
from fullshard.errors import CheckpointError

logger = logging.getLogger(__name__)


def prune_checkpoints(place: CheckpointLocation, *, keep: int, keep_every: int, step: int) -> None:
    """Removes the oldest complete checkpoints, so that `keep` remain up to and including that of `step`.

    keep: number of checkpoints to keep; 0 keeps all. Those of [Note: saved while steps are skipped] are not
        counted, but removed
    keep_every: also keeps the steps that are multiples of it; 0 for none

    A failure is only logged, because the new checkpoint is committed.
    """
    if not keep:
        return
    try:
        left = keep - 1
        for number, files in place.list_checkpoints():
            if number >= step:
                continue
            try:
                manifest = read_manifest_and_check_sizes(files)
            except CheckpointError:
                continue
            if not manifest.skipped_in_a_row:
                left -= 1
                if left >= 0:
                    continue
            if not (keep_every and number % keep_every == 0):
                place.remove_checkpoint(files)
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", place, error)
