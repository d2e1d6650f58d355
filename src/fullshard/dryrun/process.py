"""dry_run(plan): peak memory of one rank, from the real sharded step in a separate process.

The process, `python -m fullshard.dryrun.process`, reads a pickled request and writes a pickled answer. A
multiprocessing pool would import the caller's main script again, and lose the stderr of a process that ends.
"""

import os
import pickle
import subprocess
import sys

from fullshard.dryrun.values import DryRunMemory, Program
from fullshard.errors import FullshardError, ShardError
from fullshard.spec.dotted import import_callable
from fullshard.spec.plan import Plan


def dry_run(plan: Plan, program: Program | None = None, *, rank: int = 0) -> DryRunMemory:
    """Returns the peak memory of `rank`, from a dry run (see `dryrun.step.run_dry_step`).

    The default program trains the run's model on tokens. The step runs in a process of its own, because a
    process group is global and an error within backward ends the process.

    Raises the error of the dry run (SpecError, PlanError, ShardError, TrainError), or a ShardError with the
    last line of its standard error.
    """
    child = subprocess.run(
        [sys.executable, "-P", "-m", "fullshard.dryrun.process"],
        input=pickle.dumps((plan, program or Program(), rank)),
        # The child must be able to import everything that this process can.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
        capture_output=True,
    )
    if not child.stdout:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        raise ShardError(
            "the dry run did not finish.",
            got=lines[-1] if lines else f"exit code {child.returncode}",
            why="the model's forward, loss or backward failed on fake tensors, or its process was ended",
            fix="a step of the same model on real tensors, which shows where",
        )
    answer: DryRunMemory | FullshardError = pickle.loads(child.stdout)
    if isinstance(answer, FullshardError):
        raise answer
    return answer


def _answer_request() -> None:
    """Answers the request on standard input. Anything that the model prints goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        plan, program, rank = pickle.load(sys.stdin.buffer)
        answer = _dry_run_in_this_process(plan, program, rank=rank)
    except FullshardError as error:
        error.got = None if error.got is None else str(error.got)  # may be a value that cannot be pickled
        answer = error
    with os.fdopen(answers, "wb") as file:
        pickle.dump(answer, file)


def _dry_run_in_this_process(plan: Plan, program: Program, *, rank: int) -> DryRunMemory | FullshardError:
    import torch

    from fullshard.dryrun.step import run_dry_step
    from fullshard.torch_private.tensors import tree_map_only

    build = import_callable(program.model, key="Program.model")
    with torch.device("meta"):
        model = build(plan)
    given = import_callable(program.batch, key="Program.batch")(
        plan
    )  # may build the model, which fake tensors cannot initialise
    choose_loss = import_callable("fullshard.training.loss:choose_loss", key="Program.loss")
    return run_dry_step(
        model,
        plan,
        loss=choose_loss(plan.run, model)
        if program.loss is None
        else import_callable(program.loss, key="Program.loss"),
        optimizer=import_callable(program.optimizer, key="Program.optimizer"),
        batch=lambda _: tree_map_only(torch.Tensor, torch.zeros_like, given),
        rank=rank,
    )


if __name__ == "__main__":
    _answer_request()
