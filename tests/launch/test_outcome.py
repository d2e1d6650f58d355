"""Every way out has an exit code and a message, and is read by another process."""

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
