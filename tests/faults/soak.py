"""Many kills of one run in one directory, at random moments; then everything that it left is looked at."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard.checkpoint.load import iterate_damage
from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.faults.test_kills import VICTIMS
from tests.launch.jobs import SMALL
from tests.ranks import RankFailed

STARTING = 0.2  # of all kills: so soon after the start of an attempt; others, after its first steps
MOST_SECONDS = 1.0
MANY = 100_000  # steps: no attempt comes to its end
SETTINGS = (
    "sharding.strategy=full_shard",
    "schedule.kind=constant",
    "checkpoint.every=1",
    "checkpoint.keep=2",
)
Files = dict[str, int]  # size by path, without those that grow by a line a step or an attempt


def trained(directory: str, steps: int, mode: str, victims: tuple[int, ...], seconds: float) -> None:
    """Trains, or resumes. Each victim is killed after its number of seconds, most of them after a step."""
    if dist.get_rank() in victims:
        log = None if seconds < STARTING * MOST_SECONDS else Path(directory, "metrics.jsonl")
        threading.Thread(target=_die, args=(seconds, log), daemon=True).start()
    settings = (*SMALL, *SETTINGS, f"train.steps={steps}", f"checkpoint.mode={mode}", f"run.dir={directory}")
    run = Run.load(overrides=[*settings, "run.ranks=2"])
    resume = any(Path(directory).glob("checkpoints/step-*"))
    run_job(run, resume=resume, plan=Plan.from_run(run, world_size=2), command_started=time.time())


def _die(seconds: float, log: Path | None) -> None:
    before = _size(log)
    while log is not None and _size(log) == before:
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def losses(directory: Path) -> list[tuple[int, float]]:
    lines = (directory / "metrics.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b"", "the last line is cut off"
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def files_in(directory: Path) -> Files:
    own = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    return {str(path.relative_to(directory)): path.stat().st_size for path in own}


def kill_one_run(ranks: Callable, place: Path, *, times: int, mode: str) -> tuple[int, int, int]:
    """Returns the last step, and the number and bytes of the files that the run left beside its log."""
    rng, directory = random.Random(mode), place / "run"
    for _ in range(times):
        victims, seconds = rng.choice(list(VICTIMS.values())), rng.uniform(0, MOST_SECONDS)
        with pytest.raises((RankFailed, RuntimeError)):
            ranks(2).run(trained, str(directory), MANY, mode, victims, seconds)
    end = losses(directory)[-1][0] + 10
    ranks(2).run(trained, str(directory), end, mode, (), 0.0)
    ranks(2).run(trained, str(place / "undisturbed"), end, mode, (), 0.0)
    assert losses(directory) == losses(place / "undisturbed")
    assert [step for step, _ in losses(directory)] == list(range(1, end + 1))
    for line in (directory / "events.jsonl").read_text().splitlines():
        assert json.loads(line)
    checkpoints = directory / "checkpoints"
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left[0] == ".lock"
    assert len(left) <= 3, left
    assert not [one for step in checkpoints.glob("step-*") for one in iterate_damage(step)]
    files, others = files_in(directory), files_in(place / "undisturbed")
    names = {name for name in files if not name.startswith("checkpoints")}
    assert not names - set(others), "what a run without kills does not leave"
    assert sum(files.values()) <= 1.1 * sum(others.values()) + 4096
    return end, len(files), sum(files.values())
