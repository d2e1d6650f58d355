"""Offloaded state that earlier runs left on the drive, and the messages of a run that does not use it."""

from collections.abc import Iterator
from pathlib import Path

from fullshard.distributed.agreement import on_rank_zero, rank
from fullshard.errors import CheckpointError
from fullshard.offload.directories import leftovers
from fullshard.offload.generation_manifest import SavedRunState, find_saved_state
from fullshard.quantities import format_bytes
from fullshard.spec.plan import Plan
from fullshard.training.resume import newest_saved
from fullshard.training.shard import directory_of


def find_unusable_state(plan: Plan, *, saved: Path | str | None, must_resume: bool) -> SavedRunState | None:
    """Finds offloaded state that a resuming run cannot use; None if there is none. Collective.

    State is unusable if the offload target or the number of ranks has changed.

    saved: location of the checkpoints; None for a new run

    Raises CheckpointError if the run must resume, and there is no checkpoint but only unusable state.
    """
    if saved is None:
        return None

    def look() -> SavedRunState | None:
        found = find_saved_state(directory_of(plan, rank=0).parent)
        if found is None or _reason(plan, found) is None:
            return None
        if must_resume and newest_saved(saved, plan) is None:
            raise CheckpointError(
                f"there is no checkpoint in {saved}, and {found.directory} is of no use here.",
                got=_described(found),
                why=f"it is of {_ranks(found.world_size)} with an nvme tier, and {_reason(plan, found)}",
                fix=f"--resume on {_ranks(found.world_size)} with an nvme tier; what is there stays",
            )
        return found

    return on_rank_zero(look, doing="looking for state on the drive")


def unusable_message(plan: Plan, found: SavedRunState, *, step: int) -> str | None:
    """Returns the message that a run resumes after `step`, without `found`; None if `found` is not newer."""
    if found.step <= step:
        return None
    on = f"resumes from the checkpoint of step {step}" if step else "begins anew"
    return (
        f"{found.directory} holds {_described(found)}, which is not used, for {_reason(plan, found)}: "
        f"the run {on}"
    )


def leftover_messages(plan: Plan, *, aside: Path | None, reported: Path | None = None) -> Iterator[str]:
    """Yields, on rank 0 only, a message for each offloaded state that finished runs left on the drive.

    aside: directory that an earlier run was moved to
    reported: directory of a state to omit, because another message reports it
    """
    if rank() != 0:
        return
    path, own = Path(plan.run.offload.path), directory_of(plan, rank=0).parent
    places = [aside / path] if aside is not None and not path.is_absolute() else []
    for place in [*places, own.parent]:
        alive = own.name if plan.run.offload.on_disk and place == own.parent else None
        for left, size in leftovers(place, alive_run_id=alive, alive_ranks=plan.world_size):
            if left != reported:
                yield f"{left} holds {format_bytes(size)} of optimizer state of a run that is over"


def _reason(plan: Plan, found: SavedRunState) -> str | None:
    if not plan.run.offload.on_disk:
        return f'offload.tier is now "{plan.run.offload.tier}"'
    if found.world_size != plan.world_size:
        return f"there are now {_ranks(plan.world_size)}"
    return None


def _described(found: SavedRunState) -> str:
    return f"step {found.step} of {_ranks(found.world_size)} ({format_bytes(found.taken_bytes)})"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
