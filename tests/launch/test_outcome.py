"""Every way out has an exit code and a message, and is read by another process."""

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.errors import FullshardError, LaunchError, SpecError
from fullshard.launch.outcome import OwnFaultRecorder, ProcessOutcome


def ending_of(error: BaseException) -> ProcessOutcome:
    with ProcessOutcome() as ending:
        raise error
    return ending


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (SystemExit(), 0),
        (SystemExit(75), 75),
        (KeyboardInterrupt(), 130),
        (SpecError("no"), SpecError.exit_code),
        (LaunchError("no"), LaunchError.exit_code),
        (ZeroDivisionError("no"), 1),
    ],
)
def test_every_way_out_has_its_exit_code(error: BaseException, exit_code: int) -> None:
    assert ending_of(error).exit_code == exit_code


@pytest.mark.parametrize("error", [SpecError("no", got=3, fix="4"), ZeroDivisionError("no"), SystemExit(75)])
def test_an_ending_is_read_as_it_was_written(error: BaseException, tmp_path: Path) -> None:
    written = ending_of(error)
    written.save(tmp_path / "ending.json")
    read = ProcessOutcome.load(tmp_path / "ending.json")
    assert read is not None
    assert (read.exit_code, read.failure) == (written.exit_code, written.failure)
    assert [path.name for path in tmp_path.iterdir()] == ["ending.json"]


def test_a_missing_outcome_reads_as_none(tmp_path: Path) -> None:
    assert ProcessOutcome.load(tmp_path / "ending.json") is None


def test_a_foreseen_error_is_its_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULLSHARD_TRACEBACK", raising=False)
    error: FullshardError = SpecError("no.", got=3, why="it is not 4", fix="4")
    failure = ending_of(error).failure
    assert failure is not None
    assert failure.user_message() == f"error: {error}"
    assert failure.user_message(rank=2) == f"rank 2: {error}"


def test_torchrun_gets_the_first_error_of_a_rank_and_the_traceback_of_an_unforeseen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "0")
    for error in (ZeroDivisionError("first"), SpecError("second.")):
        with pytest.raises(type(error)), OwnFaultRecorder(tmp_path / "run"):
            raise error
    read: Any = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "ZeroDivisionError: first" in read.message["message"]
    assert "Traceback (most recent call last)" in read.message["extraInfo"]["py_callstack"]
    assert abs(read.timestamp - time.time()) < 3600


def test_an_unforeseen_error_names_the_line_of_the_user() -> None:
    with ProcessOutcome() as ending:
        Path("/nowhere/at/all").read_text()  # raised in a library, called from here
    assert ending.failure is not None
    assert f"where: {__file__}:" in ending.failure.message
    assert "FULLSHARD_TRACEBACK=1" in ending.failure.message


def test_notes_of_an_unforeseen_error_are_in_its_message() -> None:
    error = ZeroDivisionError("no")
    error.add_note("in the evaluation 'quiz' on rank 1")
    failure = ending_of(error).failure
    assert failure is not None
    assert "ZeroDivisionError: no\n  in the evaluation 'quiz' on rank 1\n" in failure.message


def test_an_error_that_ranks_of_a_node_share_is_printed_once_under_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("JOB_ID", "STEP_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "7")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")

    def printed(error: FullshardError, rank: int) -> str:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_LOCALID", str(rank))
        failure = ending_of(error).failure
        assert failure is not None
        failure.report_once_per_node(f"rank {rank}: {error}")
        return capsys.readouterr().err

    assert [printed(SpecError("no."), rank) for rank in range(3)] == ["rank 0: no.\n", "", ""]
    assert printed(SpecError("another."), 1) == "rank 1: another.\n"
    assert [printed(SpecError("no."), rank) for rank in (2, 0)] == ["rank 2: no.\n", ""], "a later command"
    monkeypatch.setenv("SLURM_STEP_ID", "8")
    assert printed(SpecError("no."), 1) == "rank 1: no.\n", "another step"
    (tmp_path / "fullshard-srun-7-9-0").write_text("not a directory, as another user's may be")
    monkeypatch.setenv("SLURM_STEP_ID", "9")
    assert [printed(SpecError("no."), rank) for rank in (0, 1)] == ["rank 0: no.\n", "rank 1: no.\n"]
