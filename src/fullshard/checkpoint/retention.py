"""Which old checkpoints are kept: the last good ones, as [Note: the last good checkpoint] defines them.

Only a good checkpoint prunes. So while a run is dead or may be, the newest `keep` from before stay, however
long it continues and however often it restarts.
"""

import logging

from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import read_manifest_and_check_sizes
from fullshard.errors import CheckpointError

logger = logging.getLogger(__name__)


def prune_checkpoints(place: CheckpointLocation, *, keep: int, keep_every: int, step: int) -> None:
    """Removes the oldest complete checkpoints, so that `keep` remain up to and including that of `step`.

    keep: number of good checkpoints to keep, that of `step` among them; 0 keeps all. Those to avoid are not
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
            if manifest.why_avoided is None:
                left -= 1
                if left >= 0:
                    continue
            if not (keep_every and number % keep_every == 0):
                place.remove_checkpoint(files)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s could not be removed: %s", place, error)
