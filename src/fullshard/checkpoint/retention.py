"""Which old checkpoints are kept: the last good ones, as [Note: the last good checkpoint] defines them.

Only a good checkpoint prunes. So while a run is dead or may be, the newest `keep` from before stay, however
long it continues and however often it restarts.
"""

import logging
from contextlib import suppress

from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import Manifest, read_manifest_and_check_sizes
from fullshard.checkpoint.results import find_best_step
from fullshard.errors import CheckpointError
from fullshard.spec.settings.evaluate_section import BestResult

logger = logging.getLogger(__name__)


def prune_checkpoints(
    place: CheckpointLocation, *, keep: int, keep_every: int, step: int, best: BestResult | None = None
) -> None:
    """Removes the oldest complete checkpoints, so that `keep` remain up to and including that of `step`.

    keep: number of good checkpoints to keep, that of `step` among them; 0 keeps all. Those to avoid are not
        counted, but removed
    keep_every: also keeps the steps that are multiples of it; 0 for none
    best: also keeps the good checkpoint whose result is the best, see `find_best_step`; None keeps none

    A failure is only logged, because the new checkpoint is committed.
    """
    if not keep:
        return
    try:
        whole = list[tuple[int, CheckpointFiles, Manifest]]()
        for number, files in place.list_checkpoints():
            with suppress(CheckpointError):
                if number <= step:
                    whole.append((number, files, read_manifest_and_check_sizes(files)))
        good = [(number, one.values) for number, _, one in whole if not one.why_avoided]
        kept = {step, *(number for number, _ in good[:keep]), find_best_step(good, best)}
        for number, files, _ in whole:
            if number not in kept and not (keep_every and number % keep_every == 0):
                place.remove_checkpoint(files)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s could not be removed: %s", place, error)
