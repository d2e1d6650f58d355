"""Impossible requests are refused before any rank is started."""

import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from fullshard.errors import INTERRUPTED_EXIT_CODE, LaunchError, SpecError
from fullshard.launch.request import LaunchRequest
from fullshard.launch.start import (
    choose_rank_count_and_device,
    perform_request,
    temporary_private_directory,
)
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

NO_JOB = "tests.launch.jobs:absent"  # a rank that was started would fail with another message


def run_with(*overrides: str) -> Run:
    return Run.load(overrides=["run.device=cpu", *overrides])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test does without")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(LaunchError, match="no CUDA device"):
        perform_request(LaunchRequest(run=run_with("run.device=cuda"), job=NO_JOB))


def test_ranks_are_those_asked_for_else_those_of_the_plan_else_two() -> None:
    plan = Plan.from_run(run_with(), world_size=4)
    assert choose_rank_count_and_device(LaunchRequest(run=run_with("run.ranks=8"))) == (8, "cpu")
    assert choose_rank_count_and_device(LaunchRequest(run=run_with(), plan=plan)) == (4, "cpu")
    assert choose_rank_count_and_device(LaunchRequest(run=run_with())) == (2, "cpu")


def test_a_job_that_is_not_a_function_is_named_in_the_error() -> None:
    with pytest.raises(SpecError, match="jobs:absent' is not a function"):
        LaunchRequest(run=Run(), job=NO_JOB).call_job()


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan.from_run(run_with("sharding.strategy=zero2"), world_size=2)
    request = LaunchRequest(run=plan.run, plan=plan, resume=True)
    request.save(tmp_path)
    assert LaunchRequest.load(tmp_path) == request


CODES = {"nothing": None, "zero": 0, "words": "enough", "interrupted": INTERRUPTED_EXIT_CODE}


def leave(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    sys.exit(CODES[run.run.dir])


@pytest.mark.parametrize("code", ["nothing", "zero", "words"])
def test_a_job_that_calls_exit_has_failed_with_any_code(code: str) -> None:
    with pytest.raises(LaunchError, match="rank 0 left early"):
        LaunchRequest(run=run_with(f"run.dir={code}"), job=f"{__name__}:leave").call_job()


def test_an_interrupted_job_that_saved_exits_with_the_interrupted_code() -> None:
    with pytest.raises(SystemExit, match="75"):
        LaunchRequest(run=run_with("run.dir=interrupted"), job=f"{__name__}:leave").call_job()


def test_the_launchers_directory_is_that_of_this_user_alone_under_any_umask() -> None:
    before = os.umask(0)
    try:
        with temporary_private_directory() as name:
            assert stat.S_IMODE(os.stat(name).st_mode) == 0o700
    finally:
        os.umask(before)
