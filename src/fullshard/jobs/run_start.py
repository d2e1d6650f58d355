"""The start of a run on its ranks: opening its directory, and the record of the attempt."""

from contextlib import ExitStack
from pathlib import Path

from fullshard.distributed.agreement import all_gather_object, run_on_rank_zero
from fullshard.errors import PlanError
from fullshard.jobs.event_log import record_start
from fullshard.jobs.launch_record import LaunchId
from fullshard.jobs.run_directory import RunDirectory, open_run_directory
from fullshard.sharding.mesh import RankInfo
from fullshard.spec.plan import Plan
from fullshard.spec.run_files import LAUNCH


def open_directory_on_rank_zero(
    stack: ExitStack, plan: Plan, *, ranks: RankInfo, resume: bool
) -> RunDirectory:
    """Opens the run's directory on rank 0, and returns it on all ranks. Records the start. Collective.

    Raises PlanError if the plan is for another number of ranks, unless this launch had an earlier attempt.
    """
    run = plan.run
    launch = LaunchId.merge_ranks(all_gather_object(LaunchId.from_environment()))
    if plan.world_size != ranks.world_size:
        record = Path(run.run.dir, LAUNCH)
        if run_on_rank_zero(lambda: launch.find_earlier_attempt(record), doing=f"reading {record}") is None:
            raise PlanError(
                f"the plan is for {plan.world_size} ranks.",
                got=f"{ranks.world_size} ranks",
                fix=f"start {plan.world_size}, or make a plan for {ranks.world_size}",
            )
    found: list[RunDirectory] = []
    if ranks.rank == 0:
        own = open_run_directory(
            Path(run.run.dir),
            resume=resume,
            launch=launch,
            saved_to=run.checkpoint.dir,
            kept=run.offload.is_on_drive,
            offload_path=run.offload.path,
        )
        found.append(stack.enter_context(own))
        record_start(found[0].root, run, ranks=ranks)
    return run_on_rank_zero(lambda: found[0], doing="opening the run's directory")
