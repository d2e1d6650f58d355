"""dry_run(plan): peak memory of one rank, from the real sharded step in a separate process."""

import os
import subprocess
import sys

from fullshard.dryrun.exchange import ChildAnswer, ChildRequest
from fullshard.dryrun.program import Program
from fullshard.dryrun.result import DryRun
from fullshard.errors import ShardError
from fullshard.spec.plan import Plan


def dry_run(plan: Plan, program: Program | None = None, *, rank: int = 0) -> DryRun:
    """Returns the peak memory of `rank`, from a dry run (see `dryrun.here.run_dry_step`).

    The default program trains the reference decoder that the plan's run describes. The dry run uses a
    separate process, because a process group is global and an error within backward ends the process.

    Raises the error of the dry run (SpecError, PlanError, ShardError, TrainError). Raises ShardError with the
    last line of its standard error if the process ended otherwise.
    """
    request = ChildRequest(plan=plan, program=program or Program(), rank=rank)
    command = [sys.executable, "-m", "fullshard.dryrun.child"]
    # The child must be able to import everything that this process can.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        command,
        input=request.model_dump_json(),
        env=environment,
        check=False,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if not child.stdout:
        raise _ended(child)
    answer = ChildAnswer.model_validate_json(child.stdout)
    if answer.failure is not None:
        raise answer.failure.error()
    assert answer.result is not None, "an answer is a result or a failure"
    return answer.result


def _ended(child: subprocess.CompletedProcess[str]) -> ShardError:
    said = child.stderr.strip().splitlines()
    return ShardError(
        "the dry run did not finish.",
        got=said[-1] if said else f"exit code {child.returncode}",
        why="the model's forward, loss or backward failed on fake tensors, or its process was ended",
        fix="a step of the same model on real tensors, which shows where",
    )
