"""Jobs for the ranks of these tests, with the signature that `launch.request.LaunchRequest` describes."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import INTERRUPTED_EXIT_CODE, DataError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.process import record_signals

FOREVER = 600.0
# A run of moments, whose losses may be held against another's.
SMALL = (
    "model.layers=2",
    "model.d_model=16",
    "model.heads=2",
    "model.d_ff=32",
    "data.sequence_length=16",
    "train.global_batch=24",
    "train.validate_every=0",
    "train.validate_sequences=4",
    "log.trace_every=0",
    "run.device=cpu",
)


def rank() -> int:
    return int(os.environ["RANK"])


def leave_note(run: Run, text: str) -> None:
    """A file that the test reads: which rank was here, and what it saw."""
    path = Path(run.run.dir, f"note-{rank()}")
    path.with_suffix(".partial").write_text(text)
    path.with_suffix(".partial").replace(path)


def wait_for_note(run: Run, of: int) -> None:
    while not Path(run.run.dir, f"note-{of}").exists():
        time.sleep(0.01)


def describe(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    threads = os.environ["OMP_NUM_THREADS"]
    leave_note(
        run, f"{rank()} of {os.environ['WORLD_SIZE']}, {threads} threads, {resume=}, steps={run.train.steps}"
    )
    sys.stdout.write(f"print of rank {rank()}\n")  # at once: unbuffered, a print is two writes


def fail_on_rank_1(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Rank 1 raises; the others sit where they hear no SIGTERM, like in a collective."""
    with record_signals(signal.SIGTERM):
        leave_note(run, "here")
        if rank() == 1:
            wait_for_note(run, 0)  # or it is ended before it has begun
            raise DataError("the well is dry.", got="0 documents", fix="another well")
        time.sleep(FOREVER)


def leave_early(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    leave_note(run, "here")
    if rank() == 0:
        wait_for_note(run, 1)
        sys.exit(0)
    time.sleep(FOREVER)


def until_interrupted(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Takes its time to save, longer for rank 1 than for rank 0. The ranks are connected."""
    from fullshard.parallel.mesh import process_group  # imports torch

    with record_signals(signal.SIGTERM) as signals, process_group("cpu"):
        leave_note(run, str(os.getpid()))
        while signals.first_signal is None:
            time.sleep(0.01)
    time.sleep(0.4 * rank())
    leave_note(run, "saved")
    raise SystemExit(INTERRUPTED_EXIT_CODE)


def deaf(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Hears SIGTERM, and does nothing about it."""
    with record_signals(signal.SIGTERM):
        leave_note(run, str(os.getpid()))
        time.sleep(FOREVER)


def not_ready(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Has no handlers yet."""
    leave_note(run, str(os.getpid()))
    time.sleep(FOREVER)


def killed_once(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Trains; rank 1 of the first attempt is killed in the middle of its seventh step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from fullshard.jobs.train import run_job  # imports torch

    been_here = Path(f"{run.run.dir}-been-here")
    if rank() == 1 and not been_here.exists():
        been_here.touch()
        register_optimizer_step_pre_hook(_DiesInStep(7, Path(run.run.dir)))
    run_job(run, resume=resume, plan=plan, command_started=command_started)


@dataclass
class _DiesInStep:
    """Kills its process where that step's update would begin, once the checkpoint before it is there."""

    steps: int
    directory: Path

    def __call__(self, *_: object) -> None:
        self.steps -= 1
        if self.steps == 0:
            while not list(self.directory.glob("**/step-*4")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def fails_at_once(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Fails in its first step, each time with other numbers in the error."""
    with Path(run.run.dir, "starts").open("a") as file:
        file.write("started\n")
    raise ZeroDivisionError(f"process {os.getpid()} divided by zero")
