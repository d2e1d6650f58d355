"""Offloaded state on the drive that a resuming run does not use, and its messages about it."""

from pathlib import Path

from fullshard.distributed.agreement import run_on_rank_zero
from fullshard.errors import CheckpointError
from fullshard.offload.directories import SavedRunState, find_saved_run_state
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
