"""Which old checkpoints are kept: the last good ones, as [Note: the last good checkpoint] defines them.

Only a good checkpoint prunes. So while a run is dead or may be, the newest `keep` from before stay, however
long it continues and however often it restarts.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress

from pydantic import JsonValue

from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import read_manifest_and_check_sizes
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
        whole = list(_iterate_whole(place, step))
        good = [(number, values) for number, _, values in whole if values is not None]
        kept = {step, *(number for number, _ in good[:keep]), find_best_step(good, best)}
        for number, files, _ in whole:
            if number not in kept and not (keep_every and number % keep_every == 0):
                place.remove_checkpoint(files)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s could not be removed: %s", place, error)


def _iterate_whole(
    place: CheckpointLocation, last: int
) -> Iterator[tuple[int, CheckpointFiles, Mapping[str, JsonValue] | None]]:
    """Yields (step, files, values) of the complete checkpoints up to the step `last`, the newest first.

    The values are None for one to avoid.
    """
    for number, files in place.list_checkpoints():
        if number <= last:
            with suppress(CheckpointError):
                manifest = read_manifest_and_check_sizes(files)
                yield number, files, None if manifest.why_avoided else manifest.values
