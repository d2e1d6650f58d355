"""A later attempt of the same launch continues its files; another launch sets them aside."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard.errors import PlanError
from fullshard.jobs.run_directory import LastAttemptRecord, LaunchId, RunDirectory, open_run_directory
from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.records.run_files import LAUNCH, METRICS
from fullshard.spec.run import Run
from tests.jobs.test_train import TINY

ONE, OTHER = (LaunchId(agents=frozenset({f"host:{agent}"})) for agent in (1, 2))
TORCHRUN = {"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}


def attempt(root: Path, launch: LaunchId, *, finishes: bool = False) -> RunDirectory:
    """Writes a line of metrics, as a run does."""
    with open_run_directory(root, resume=False, launch=launch) as found:
        with (root / METRICS).open("a") as file:
            file.write("a step\n")
        if finishes:
            found.record_run_end(interrupted=False)
    return found


def seen_by(agent: str, **environment: str) -> LaunchId:
    """A launch that `agent` alone starts again, with the names that the environment gives it."""
    seen = LaunchId.from_environment(environment)
    return LaunchId(frozenset({agent}), seen.jobs, seen.earlier_jobs)


def test_attempt_continues_with_files_of_its_launch(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first, second = attempt(root, ONE), attempt(root, ONE)
    assert (first.previous_attempt, second.previous_run) == (None, None)
    assert second.previous_attempt is not None
    assert (root / METRICS).read_text() == "a step\n" * 2


def test_the_run_directory_of_an_earlier_launch_is_set_aside_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    attempt(root, OTHER)
    assert [attempt(root, ONE).previous_run for _ in range(2)] == [tmp_path / "run.1", None]


def test_launches_with_a_common_agent_are_the_same(tmp_path: Path) -> None:
    attempt(tmp_path, LaunchId(agents=frozenset({"a", "b", "c"})))
    assert attempt(tmp_path, LaunchId(agents=frozenset({"c", "d"}))).previous_attempt is not None


def test_an_attempt_after_the_runs_end_continues_the_directory_of_its_launch(tmp_path: Path) -> None:
    """A rank that dies while it leaves makes torchrun start all again."""
    attempt(tmp_path, ONE, finishes=True)
    assert attempt(tmp_path, ONE).previous_attempt is not None


@pytest.mark.parametrize(
    ("first", "second", "finished", "same"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine"}, {"TORCHELASTIC_RUN_ID": "mine"}, False, True),
        ({"TORCHELASTIC_RUN_ID": "mine"}, {"TORCHELASTIC_RUN_ID": "mine"}, True, False),
        ({"TORCHELASTIC_RUN_ID": "mine"}, {"TORCHELASTIC_RUN_ID": "yours"}, False, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False, False),
    ],
    ids=["requeued", "finished", "other name", "nameless", "slurm requeue", "other job", "same job"],
)
def test_unfinished_launch_is_known_by_its_name(
    first: dict[str, str], second: dict[str, str], finished: bool, same: bool, tmp_path: Path
) -> None:
    attempt(tmp_path / "run", seen_by("a", **first), finishes=finished)
    found = attempt(tmp_path / "run", seen_by("b", **second))
    assert (found.previous_attempt is not None, found.previous_run is None) == (same, same)


def test_two_ranks_of_one_agent_see_the_same(ranks) -> None:
    one, other = ranks(2).run(LaunchId.from_environment, TORCHRUN)
    assert one == other
    assert one.agents
    assert not LaunchId.from_environment({}).agents


def test_invalid_launch_record_is_none(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"version": "0.2.0", "configurations": []}', '{"world_size": 2}'):
        (tmp_path / LAUNCH).write_text(text)
        assert LastAttemptRecord.load(tmp_path / LAUNCH) is None


def train(directory: str, steps: int, world_size: int) -> tuple[int, bool]:
    """As torchrun's ranks, with a plan for `world_size`."""
    os.environ["TORCHELASTIC_RUN_ID"] = "mine"
    run = Run.load(overrides=[*TINY, "train.global_batch=6", f"train.steps={steps}", f"run.dir={directory}"])
    plan = Plan.from_run(run, world_size=world_size)
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())
    return dist.get_world_size(), Path(directory, "checkpoints", f"step-{steps:08d}").is_dir()


def test_plan_is_made_anew_for_the_remaining_ranks(ranks, tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    ranks(3).run(train, directory, 2, 3)
    Path(directory, LAUNCH).write_text('{"jobs": ["torchrun:mine"], "world_size": 3}')
    assert ranks(2).run(train, directory, 4, 3) == [(2, True)] * 2
    steps = [line.split(",")[0] for line in Path(directory, METRICS).read_text().splitlines()]
    assert steps == [f'{{"step": {step}' for step in (1, 2, 3, 4)]


def test_plan_for_other_ranks_is_refused(ranks, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for _ in range(2):  # torchrun tries again
        with pytest.raises(PlanError, match="for 3 ranks"):
            ranks(2).run(train, str(directory), 2, 3)
    assert not directory.exists()
