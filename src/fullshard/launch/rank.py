"""The program of one rank (`python -m fullshard.launch.rank DIRECTORY LAUNCHER_PID`, or under torchrun)."""

import ctypes
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from fullshard.errors import INTERRUPTED_EXIT_CODE, TrainError
from fullshard.launch.environment import prepare_environment_if_started_as_rank
from fullshard.launch.gc import freeze_imports_in_gc
from fullshard.launch.outcome import OwnFaultRecorder, ProcessOutcome
from fullshard.launch.request import LaunchRequest
from fullshard.system.process import call_on_watchdog_exit
from fullshard.system.terminal import escape_log_messages, prepare_standard_streams

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: Sequence[str]) -> None:
    """Runs the job of the request in the directory `argv[0]`, and writes the rank's outcome there.

    The process ends with the launcher, whose pid is `argv[1]`.
    """
    directory, launcher = Path(argv[0]), int(argv[1])
    _be_killed_when_launcher_ends(launcher)
    prepare_standard_streams()
    escape_log_messages()
    prepare_environment_if_started_as_rank()
    path = directory / f"rank-{os.environ['RANK']}.json"

    def save_watchdog_error(error: TrainError) -> None:
        with ProcessOutcome() as ending:
            raise error
        ending.save(path)

    with ProcessOutcome() as ending:
        request = LaunchRequest.load(directory)
        with _redirect_stdout_to_stderr(), call_on_watchdog_exit(save_watchdog_error, shows_error=True):
            with freeze_imports_in_gc():
                request.import_job()
            request.call_job()
    ending.save(path)
    sys.stdout.flush()
    sys.stderr.flush()
    if ending.exit_code not in (0, INTERRUPTED_EXIT_CODE):
        # A failed rank exits at once, so that its peers notice: teardown may wait for a collective.
        os._exit(ending.exit_code)


def perform_as_torchrun_rank(request: LaunchRequest) -> int:
    """Runs the request's job in this process, a rank of torchrun or srun. Returns 0, or 75 if interrupted.

    Exceptions pass, and are also written to torchrun's error file (`TORCHELASTIC_ERROR_FILE`).
    """
    be_killed_when_torchrun_ends()
    try:
        with _redirect_stdout_to_stderr(), OwnFaultRecorder(request.run.run.dir):
            request.call_job()
    except SystemExit:  # `call_job` raises no other SystemExit
        return INTERRUPTED_EXIT_CODE
    return 0


def be_killed_when_torchrun_ends() -> None:
    """Makes the kernel kill this process when the agent of torchrun that started it ends (on Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) == os.getpid():  # ranks lead a session each
        _be_killed_when_launcher_ends(os.getppid())


@contextmanager
def _redirect_stdout_to_stderr() -> Generator[None]:
    """Context that redirects standard output to standard error, including the output of native code."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _be_killed_when_launcher_ends(launcher: int) -> None:
    """Makes the kernel kill this process when its launcher ends (on Linux). Exits if the launcher is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit(1)  # the launcher died before the call above


if __name__ == "__main__":
    main(sys.argv[1:])
