"""Offloaded state that earlier runs left on the drive, and the messages of a run that does not use it."""

from collections.abc import Iterator
from pathlib import Path

from fullshard.distributed.agreement import rank, run_on_rank_zero
from fullshard.errors import CheckpointError
from fullshard.offload.directories import list_leftover_directories
from fullshard.offload.generation_manifest import SavedRunState, find_saved_run_state
from fullshard.quantities import format_bytes
from fullshard.spec.plan import Plan
from fullshard.training.resume import newest_checkpoint_step
from fullshard.training.shard import rank_offload_directory


def find_unusable_state(plan: Plan, *, saved: Path | str | None, must_resume: bool) -> SavedRunState | None:
    """Returns offloaded state that a resuming run cannot use; None if all of it can be used. Collective.

    State is unusable if the offload target or the number of ranks has changed.

    saved: location of the checkpoints; None for a new run

    Raises CheckpointError if the run must resume, and there is no checkpoint but only unusable state.
    """
    if saved is None:
        return None

    def find_on_rank_zero() -> SavedRunState | None:
        found = find_saved_run_state(rank_offload_directory(plan, rank=0).parent)
        if found is None or _unusable_reason(plan, found) is None:
            return None
        ranks = _rank_count_text(found.world_size)
        if must_resume and newest_checkpoint_step(saved, plan) is None:
            raise CheckpointError(
                f"there is no checkpoint in {saved}, and {found.directory} cannot be used here.",
                got=_saved_state_text(found),
                why=f"it is of {ranks} with an nvme tier, and {_unusable_reason(plan, found)}",
                fix=f"--resume on {ranks} with an nvme tier; the files stay",
            )
        return found

    return run_on_rank_zero(find_on_rank_zero, doing="looking for state on the drive")


def unusable_state_message(plan: Plan, found: SavedRunState, *, step: int) -> str | None:
    """Returns the message that a run resumes after `step`, without `found`; None if `found` is not newer."""
    if found.step <= step:
        return None
    on = f"resumes from the checkpoint of step {step}" if step else "starts again"
    why = _unusable_reason(plan, found)
    return f"{found.directory} holds {_saved_state_text(found)}, which is not used, for {why}: the run {on}"


def leftover_state_messages(plan: Plan, *, aside: Path | None, reported: Path | None = None) -> Iterator[str]:
    """Yields, on rank 0 only, a message for each offloaded state that finished runs left on the drive.

    aside: directory that an earlier run was moved to
    reported: directory of a state to omit, because another message reports it
    """
    if rank() != 0:
        return
    path, own = Path(plan.run.offload.path), rank_offload_directory(plan, rank=0).parent
    places = [aside / path] if aside is not None and not path.is_absolute() else []
    for place in [*places, own.parent]:
        alive = own.name if plan.run.offload.is_on_drive and place == own.parent else None
        for left, size in list_leftover_directories(place, alive_run_id=alive, alive_ranks=plan.world_size):
            if left != reported:
                yield f"{left} holds {format_bytes(size)} of optimizer state of a run that is over"


def _unusable_reason(plan: Plan, found: SavedRunState) -> str | None:
    if not plan.run.offload.is_on_drive:
        return f'offload.tier is now "{plan.run.offload.tier}"'
    if found.world_size != plan.world_size:
        return f"there are now {_rank_count_text(plan.world_size)}"
    return None


def _saved_state_text(found: SavedRunState) -> str:
    return f"step {found.step} of {_rank_count_text(found.world_size)} ({format_bytes(found.taken_bytes)})"


def _rank_count_text(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
