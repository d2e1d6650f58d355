"""A run with a killed rank ends like an undisturbed one."""

import contextlib
import json
import os
import time
from pathlib import Path

from fullshard.jobs.run_directory import LastAttemptRecord
from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from tests.launch.jobs import SMALL
from tests.ranks.command import Command

STEPS = 12


def losses(directory: Path) -> list[tuple[int, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def undisturbed(directory: str) -> None:
    run = Run.load(overrides=[*SMALL, f"train.steps={STEPS}", f"run.dir={directory}"])
    plan = Plan.from_run(run, world_size=2)
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())


def test_a_run_whose_rank_was_killed_ends_like_an_undisturbed_one(ranks, tmp_path: Path) -> None:
    """In a directory that holds another run, which is set aside once."""
    straight, hit = tmp_path / "straight", tmp_path / "hit"
    ranks(2).run(undisturbed, str(straight))
    hit.mkdir()
    LastAttemptRecord(jobs=("another",), world_size=2).save(hit / "launch.json")

    settings = (f"train.steps={STEPS}", "run.restarts=1", "checkpoint.every=4")
    command = Command("tests.launch.command", ["killed_once", str(hit), *settings], environment=os.environ)
    with contextlib.closing(command):
        _, err = command.communicate(timeout=280)

    assert command.returncode == 0, err
    assert losses(hit) == losses(straight)
    assert "rank 0: " not in err, "which lost its peer"
    messages = err[err.index("rank 1 was killed by SIGKILL") :]
    assert "restart 1 of 1" in messages
    assert "restarted on 2 ranks: resumes after step 4 of 12" in messages
    events = read_events(hit / EVENTS)
    assert [(one.attempt, one.event) for one in events if one.event not in ("plan", "save")] == [
        (1, "start"),
        (1, "fault"),
        (1, "restart"),
        (2, "start"),
        (2, "resume"),
        (2, "end"),
    ]
    fault = next(one for one in events if one.event == "fault")
    assert (fault.details["rank"], fault.step) in ((1, 6), (1, 7))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hit.")] == ["hit.1"]
