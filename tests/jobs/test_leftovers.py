"""Files of earlier runs on the drive are named, and only empty directories of the run are removed."""

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.location import newest_complete_step
from fullshard.errors import CheckpointError
from fullshard.jobs.run_start import find_unusable_offloaded_state, unusable_offloaded_state_message
from fullshard.jobs.train import run_job
from fullshard.offload.directories import (
    DataFileRegion,
    RunRankIdentity,
    find_saved_run_state,
    rank_directory,
)
from fullshard.offload.generations import GenerationFiles
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.sampling import sampled
from tests.jobs.test_train import TINY
from tests.offload.writer import page
from tests.training.runs import run_of

RECORDS = [DataFileRegion(name="0", offset_bytes=0, length_bytes=4096)]


def leave(directory: Path, *, steps: list[int], world_size: int, payload: bytes = b"beside") -> Path:
    """Writes the state of a run over `world_size` ranks that died after these steps."""
    for rank in range(world_size):
        identity = RunRankIdentity(run_id=directory.name, rank=rank, world_size=world_size, layout="its own")
        own = rank_directory(directory.parent, run_id=directory.name, rank=rank)
        with GenerationFiles(own, RECORDS, identity=identity, payload_bytes=4096) as generations:
            for step in steps:
                generations.start_next_generation()
                generations.write_record("0", page(bytes(4096)))
                generations.commit_generation(step, payload)
    return directory


def plan_of(directory: Path, tier: str, *, ranks: int, path: str = "offload") -> Plan:
    run = run_of(f"run.dir={directory}", f"offload.tier={tier}", f"offload.path={path}")
    return Plan.from_run(run, world_size=ranks)


def ran(directory: str, steps: int, resume: bool, *settings: str) -> str:
    """A whole run; what its first rank says."""
    overrides = [*TINY, "train.global_batch=12", "log.trace_every=0", f"train.steps={steps}"]
    run = Run.load(overrides=[*overrides, f"run.dir={directory}", *settings])
    said = io.StringIO()
    with redirect_stderr(said):
        run_job(run, resume=resume, plan=None, command_started=time.time())
    return said.getvalue()


# What the drive holds #
def test_newest_saved_step_is_of_all_ranks(tmp_path: Path) -> None:
    directory = leave(tmp_path / "state", steps=[7, 8], world_size=4)
    found = find_saved_run_state(directory)
    assert found is not None
    assert (found.step, found.world_size, found.directory) == (8, 4, directory)
    assert found.taken_bytes >= 4 * 2 * 4096
    for path in (directory / "rank-00002").glob("state-1.json"):  # of step 8: the second that was begun
        path.unlink()
    assert (found := find_saved_run_state(directory)) is not None
    assert found.step == 7


def test_files_of_former_ranks_are_ignored(tmp_path: Path) -> None:
    directory = leave(tmp_path / "state", steps=[8], world_size=4)
    for rank in range(2):
        for path in (directory / f"rank-{rank:05d}").iterdir():
            path.unlink()
    leave(directory, steps=[6], world_size=2)
    assert (found := find_saved_run_state(directory)) is not None
    assert (found.step, found.world_size) == (6, 2)


@pytest.mark.parametrize("what", ["nothing", "no step", "no payload", "no file of ours"])
def test_unusable_directories_have_no_saved_state(what: str, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    if what == "no file of ours":
        (directory / "rank-00000").mkdir(parents=True)
    elif what != "nothing":
        steps = [] if what == "no step" else [3]
        leave(directory, steps=steps, world_size=1, payload=b"")
    assert find_saved_run_state(directory) is None


# Messages about it #
@pytest.mark.parametrize(
    ("tier", "ranks", "why"),
    [
        ("none", 4, 'offload.tier is now "none"'),
        ("optimizer:cpu", 2, 'offload.tier is now "optimizer:cpu"'),
        ("optimizer:nvme", 2, "there are now 2 ranks"),
        ("params+optimizer:nvme", 1, "there are now 1 rank"),
        ("optimizer:nvme", 4, None),
    ],
)
def test_reason_why_saved_state_is_not_used(tier: str, ranks: int, why: str | None, tmp_path: Path) -> None:
    directory = leave(tmp_path / "offload" / "state", steps=[8], world_size=4)
    plan = plan_of(tmp_path, tier, ranks=ranks)
    found = find_unusable_offloaded_state(plan, saved=tmp_path / "checkpoints", must_resume=False)
    assert (found is not None) == (why is not None)
    if found is not None:
        said = unusable_offloaded_state_message(plan, found, step=5) or ""
        assert said.startswith(f"{directory} holds step 8 of 4 ranks (")
        assert said.endswith(f"which is not used, for {why}: the run resumes from the checkpoint of step 5")
        assert (unusable_offloaded_state_message(plan, found, step=0) or "").endswith("the run starts again")
        assert unusable_offloaded_state_message(plan, found, step=8) is None, "the checkpoint is as new"
    assert find_unusable_offloaded_state(plan, saved=None, must_resume=False) is None, (
        "a new run has no earlier state"
    )


def test_resume_stops_if_unusable_state_is_the_only_one(tmp_path: Path) -> None:
    leave(tmp_path / "offload" / "state", steps=[8], world_size=4)
    plan = plan_of(tmp_path, "optimizer:nvme", ranks=2)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint.*step 8 of 4 ranks.*try: --resume on 4"):
        find_unusable_offloaded_state(plan, saved=tmp_path / "checkpoints", must_resume=True)


# Whole runs #
@pytest.mark.parametrize("tier", sampled(["none", "optimizer:nvme"], here=["optimizer:nvme"]))
def test_resume_reports_offloaded_state_that_it_cannot_use(tier: str, ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(ran, str(tmp_path), 2, False)
    state = leave(tmp_path / "offload" / "state", steps=[8], world_size=4)
    said = ranks(2).run(ran, str(tmp_path), 3, True, f"offload.tier={tier}")[0]
    assert "resumed at step 2 of 3" in said
    assert f"{state} holds step 8 of 4 ranks" in said
    assert newest_complete_step(tmp_path / "checkpoints") == 3
    left = range(4) if tier == "none" else (2, 3)  # the ranks' own are in the way, and go at the end
    assert sorted(one.name for one in state.iterdir()) == [f"rank-{rank:05d}" for rank in left]


@pytest.mark.parametrize(
    "what",
    sampled(
        ["a relative path", "a file of others", "an absolute path"],
        here=["a relative path", "an absolute path"],
    ),
)
def test_finished_run_removes_its_empty_directories(what: str, ranks: Any, tmp_path: Path) -> None:
    root, nvme = tmp_path / "run", tmp_path / "nvme"
    (root / "deep").mkdir(parents=True)
    nvme.mkdir()
    if what == "a file of others":
        (root / "deep" / "mine").touch()
    path = nvme if what == "an absolute path" else "deep/offload"
    tier = ("offload.tier=optimizer:nvme", f"offload.path={path}")
    ranks(2).run(ran, str(root), 2, False, *tier)
    assert list(nvme.iterdir()) == [], "only that is ours which lies in it"
    assert not (root / "deep" / "offload").exists()
    assert [one.name for one in root.glob("deep/*")] == (["mine"] if what == "a file of others" else [])
    assert (root / "deep").exists() == (what != "a relative path")
