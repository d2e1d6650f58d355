"""`fullshard train` with state on a drive that is full, fails or is damaged: exit codes, and what follows."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fullshard.checkpoint.load import iterate_damage
from fullshard.errors import OffloadError
from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.faults.disks import small_disk
from tests.launch.jobs import SMALL

STEPS = 40
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "run.ranks=2",
    "sharding.strategy=full_shard",  # the command plans what is left to it; the ranks of a pool do not
    "schedule.kind=constant",
    "checkpoint.every=5",
    "offload.sub_group_parameters=1",
)
PATIENCE_SECONDS = 150.0


def settings(directory: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={directory}", *more]


def trained(directory: str, more: tuple[str, ...], resume: bool) -> None:
    """Runs the job of the command in the ranks of the pool, which start quicker."""
    run = Run.load(overrides=settings(Path(directory), *more))
    run_job(run, resume=resume, plan=Plan.from_run(run, world_size=2), command_started=time.time())


def losses(directory: Path) -> list[tuple[int, float]]:
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [(line["step"], line["loss"]) for line in map(json.loads, text.splitlines()[: text.count("\n")])]


FEW_STEPS = "train.steps=10"


def said_by_ranks(ranks: Callable, run: Path, more: Sequence[str]) -> str:
    with pytest.raises(OffloadError) as caught:
        ranks(2).run(trained, str(run), tuple(more), True)
    return str(caught.value)


def said_by_the_command(_ranks: Callable, run: Path, more: Sequence[str]) -> str:
    """Which ends with the error's exit code, and makes no other attempt."""
    sets = [part for setting in settings(run, *more, "run.restarts=2") for part in ("--set", setting)]
    command = [sys.executable, "-m", "fullshard", "train", *sets, "--resume"]
    full = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert full.returncode == OffloadError.exit_code, full.stderr
    assert "would fail again" in full.stderr
    assert "restart 1" not in full.stderr
    return full.stderr


@pytest.mark.parametrize(
    "said_by", [said_by_ranks, pytest.param(said_by_the_command, marks=pytest.mark.long)]
)
def test_a_full_drive_is_an_error_and_loses_no_step(ranks, tmp_path: Path, said_by: Callable) -> None:
    """The files of one rank fit at most. What had been saved serves elsewhere."""
    run, tier = tmp_path / "run", ("offload.tier=optimizer:nvme", FEW_STEPS)
    ranks(2).run(trained, str(run), ("train.steps=5",), False)
    with small_disk(tmp_path / "nvme", size_bytes=48 << 20) as place:
        said = said_by(ranks, run, (*tier, f"offload.path={place}"))
    for word in ("not enough space", "got: ", "why: ", "try: "):
        assert word in said
    assert [list(iterate_damage(one)) for one in (run / "checkpoints").glob("step-*")] == [[]]
    ranks(2).run(trained, str(run), tier, True)
    ranks(2).run(trained, str(tmp_path / "undisturbed"), (FEW_STEPS,), False)
    assert len(losses(run)) == 10
    assert losses(run) == losses(tmp_path / "undisturbed")
