"""Which old checkpoints are kept: the last good ones, as [Note: the last good checkpoint] defines them.

Only a good checkpoint prunes. So while a run is dead or may be, the newest `keep` from before stay, however
long it continues and however often it restarts.
"""

import logging
from contextlib import suppress
from itertools import islice

from pydantic import JsonValue

from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import read_manifest_and_check_sizes
from fullshard.checkpoint.results import RESULTS, find_best_step
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.settings.evaluate_section import BestResult

logger = logging.getLogger(__name__)


def prune_checkpoints(
    place: CheckpointLocation,
    *,
    keep: int,
    keep_every: int,
    step: int,
    best: BestResult | None = None,
    good: dict[int, JsonValue],
) -> None:
    """Removes the oldest complete checkpoints, so that `keep` remain up to and including that of `step`.

    keep: number of good checkpoints to keep, that of `step` among them; 0 keeps all. Those to avoid are not
        counted, but removed
    keep_every: also keeps the steps that are multiples of it; 0 for none
    best: also keeps the good checkpoint whose result is the best, see `find_best_step`; None keeps none
    good: results, by step, of complete and good checkpoints that this process has saved or read, that of
        `step` among them. They are not read again; those that are read now are added

    A failure is only logged, because the new checkpoint is committed.
    """
    if not keep:
        return
    try:
        there = [one for one in place.list_steps() if one <= step]
        found = (one for one in there if _is_good(place, one, good=good))
        counted = list(islice(found, keep) if best is None else found)
        kept = {step, *counted[:keep], find_best_step([(n, {RESULTS: good[n]}) for n in counted], best)}
        for number in there:
            if number in kept or (keep_every and number % keep_every == 0):
                continue
            if (files := place.find_checkpoint(number)) is not None:
                with suppress(DamagedCheckpointError):  # has no readable manifest
                    place.remove_checkpoint(files)
            good.pop(number, None)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s could not be removed: %s", place, error)


def _is_good(place: CheckpointLocation, step: int, *, good: dict[int, JsonValue]) -> bool:
    """Returns whether a checkpoint is complete, judged by file sizes, and not to be avoided."""
    if step not in good and (files := place.find_checkpoint(step)) is not None:
        with suppress(CheckpointError):
            manifest = read_manifest_and_check_sizes(files)
            if manifest.why_avoided is None:
                good[step] = manifest.values.get(RESULTS)
    return step in good
