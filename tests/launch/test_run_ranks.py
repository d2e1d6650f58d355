"""Ranks in processes of their own: exit codes and messages of runs that end, fail or are interrupted."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fullshard.errors import INTERRUPTED_EXIT_CODE, DataError, LaunchError
from fullshard.launch.outcome import CTRL_C_EXIT_CODE
from tests.launch.sockets import Address, listening
from tests.ranks.command import Command

# Far less than the jobs sleep, so that waiting for a rank that should have been ended fails the test.
TIMEOUT = 200

Start = Callable[..., Command]


@contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """`start(job)`: two ranks that do `job`, whose notes lie in `directory`."""
    with ExitStack() as started:

        def start_one(job: str, **environment: str) -> Command:
            clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            clean["TMPDIR"] = str(directory)  # a launcher that is killed leaves its directory behind
            arguments = [job, str(directory)]
            process = Command("tests.launch.command", arguments, environment=clean | environment)
            started.callback(process.close)
            return process

        yield start_one


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start_one:
        yield start_one


@dataclass(frozen=True)
class Interrupted:
    """A job of ranks that were connected before SIGTERM."""

    exit_code: int
    err: str
    notes: list[str]
    listened_on: list[set[Address]]  # of the launcher and of each rank


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    directory = tmp_path_factory.mktemp("interrupted")
    with starting(directory) as start:
        process = start("until_interrupted")
        pids = [process.pid, *map(int, notes(directory))]
        sockets = [listening(pid) for pid in pids]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT)
    addresses = [{address for address, _ in found} for found in sockets]
    return Interrupted(process.returncode, err, notes(directory), addresses)


def wait_until(comes: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not comes():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def notes(directory: Path, *, of: int = 2) -> list[str]:
    """The notes of all ranks, once they are there."""
    paths = [directory / f"note-{rank}" for rank in range(of)]
    wait_until(lambda: all(path.exists() for path in paths))
    return [path.read_text() for path in paths]


def test_every_rank_performs_the_request_with_its_part_of_the_cores(start: Start, tmp_path: Path) -> None:
    process = start("describe")
    out, err = process.communicate(timeout=TIMEOUT)
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    seen = [f"{rank} of 2, {threads} threads, resume=True, steps=7" for rank in (0, 1)]
    assert notes(tmp_path) == seen
    assert (process.returncode, out) == (0, "")
    assert sorted(err.splitlines()) == ["print of rank 0", "print of rank 1"]


def test_a_rank_that_raises_ends_all_and_its_message_is_the_only_one(start: Start, tmp_path: Path) -> None:
    process = start("fail_on_rank_1")
    notes(tmp_path)
    out, err = process.communicate(timeout=TIMEOUT)
    assert err == "rank 1: the well is dry.\n  got: 0 documents\n  try: another well\n"
    assert (process.returncode, out) == (DataError.exit_code, "")


def test_a_job_that_fails_again_without_a_step_is_not_started_a_third_time(tmp_path: Path) -> None:
    settings = ("run.restarts=6", "run.ranks=1")
    command = Command(
        "tests.launch.command", ["fails_at_once", str(tmp_path), *settings], environment=os.environ
    )
    with contextlib.closing(command):
        _, err = command.communicate(timeout=TIMEOUT)
    assert command.returncode == 1
    assert (tmp_path / "starts").read_text() == "started\n" * 2
    assert "restart 1 of 6, from" in err
    assert "not restarted, after 1 of 6 restarts" in err
    assert "twice in a row, in the first step" in err


def test_a_rank_that_leaves_with_exit_code_0_is_named_and_ends_all(start: Start, tmp_path: Path) -> None:
    process = start("leave_early")
    notes(tmp_path)
    _, err = process.communicate(timeout=TIMEOUT)
    assert err.startswith("rank 0 left early.\n  got: sys.exit(0)\n")
    assert process.returncode == LaunchError.exit_code


def test_interrupted_ranks_are_waited_for_until_all_have_saved(interrupted: Interrupted) -> None:
    assert (interrupted.exit_code, interrupted.notes) == (INTERRUPTED_EXIT_CODE, ["saved", "saved"])
    said = "SIGTERM: the ranks finish this step and save (Ctrl-C ends them now)\n"
    assert interrupted.err == said


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the sockets")
def test_a_job_of_one_machine_listens_on_loopback_alone(interrupted: Interrupted) -> None:
    assert all(interrupted.listened_on), "the launcher keeps a store, and gloo listens in every rank"
    assert all(address.is_loopback for address in set[Address]().union(*interrupted.listened_on))


def test_a_second_ctrl_c_ends_ranks_that_do_not_heed_the_first(start: Start, tmp_path: Path) -> None:
    process = start("deaf")
    pids = [int(note) for note in notes(tmp_path)]
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: the ranks finish this step" in process.error_output())
    time.sleep(0.7)  # the first of two within half a second counts for both
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == CTRL_C_EXIT_CODE
    assert err.endswith("ended at once; unsaved steps are lost\n")
    assert not any(runs(pid) for pid in pids)


def test_an_interrupt_before_training_reports_that_nothing_was_saved(start: Start, tmp_path: Path) -> None:
    process = start("not_ready")
    notes(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted outside of training" in err


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a process learns that its parent has died")
def test_no_rank_outlives_a_launcher_that_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("deaf")
    pids = [int(note) for note in notes(tmp_path)]
    process.kill()
    deadline = time.monotonic() + TIMEOUT
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def runs(pid: int) -> bool:
    """Returns whether the process exists and is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
