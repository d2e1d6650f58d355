"""A run's own saves: in either mode they hold the same, and a failure does what the settings say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fullshard.checkpoint import load, location_of
from fullshard.errors import CheckpointError
from fullshard.jobs.checkpoints import RunCheckpointSaver
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from tests.checkpoint.states import saved
from tests.training.runs import Pairs, local_bits, mean_square, run_of, same_bits, sharded


def saved_while_training(directory: Path, settings: list[str]) -> tuple[list[str], bool]:
    """Returns the messages, and whether each saved step loads with the same bits."""
    run = run_of(*settings)
    state, plan = sharded(run)
    said: list[str] = []
    bits = {}
    with RunCheckpointSaver(directory, plan, say=said.append) as checkpoints:
        for step in train(state, plan, loss=mean_square):
            checkpoints.report_finished_saves()
            checkpoints.save(state)
            bits[step.index] = local_bits(state)
        checkpoints.wait_for_saves()
    fresh, _ = sharded(run)
    right = []
    unsaved = [line.split(":")[0] for line in said if "NOT SAVED" in line]
    for index, expected in bits.items():
        where = directory / f"step-{index:08d}"
        if f"step {index}" not in unsaved:
            load(fresh, where)
            right.append(same_bits(local_bits(fresh), expected))
    return said, bool(right) and all(right)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failure_is_reported_and_training_continues(ranks, tmp_path, mode):
    saved(tmp_path, 3)  # of another model, and so it is kept
    settings = [f"checkpoint.mode={mode}", "checkpoint.keep=0"]
    for said, right in ranks(2).run(saved_while_training, tmp_path, settings):
        assert right
        failures = [line for line in said if "NOT SAVED" in line]
        assert len(failures) == 1
        assert failures[0].startswith("step 3: NOT SAVED")
        assert "holds another model" in failures[0]


def save_last(directory: Path) -> None:
    state, plan = sharded(run_of())
    with RunCheckpointSaver(directory, plan, say=lambda text: None) as checkpoints:
        checkpoints.save_last(state)


def test_the_last_save_of_a_run_must_succeed(ranks, tmp_path):
    saved(tmp_path, 0)  # of another model
    with pytest.raises(CheckpointError, match="holds another model"):
        ranks(1).run(save_last, tmp_path)


class NotFinite(Pairs):
    """The targets of steps 3 and 4 are not finite."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().microbatches(step, rank=rank, plan=plan):
            yield x, y + (torch.nan if step in (2, 3) else 0.0)


def saved_among_skipped_steps(directory: Path, mode: str) -> tuple[list[int], list[bool]]:
    state, plan = sharded(run_of(f"checkpoint.mode={mode}", "checkpoint.keep=0"), data=NotFinite())
    postponed = []
    with RunCheckpointSaver(directory, plan, say=lambda text: None) as checkpoints:
        for step in train(state, plan, loss=mean_square):
            if step.index % 3 == 0 or checkpoints.postponed:
                checkpoints.save(state)
            postponed.append(checkpoints.postponed)
    return [step for step, _ in location_of(directory).list_checkpoints()], postponed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_is_due_while_steps_are_skipped_follows_them(ranks, tmp_path, mode):
    saved_steps, postponed = ranks(1).run(saved_among_skipped_steps, tmp_path, mode)[0]
    assert saved_steps == [6, 5]
    assert postponed == [False, False, True, True, False, False]


def steps_saved_at_each_flush(directory: Path, mode: str) -> list[list[int]]:
    state, plan = sharded(run_of(f"checkpoint.mode={mode}", "checkpoint.keep=0", "train.steps=3"))
    place, found = location_of(directory), []

    def flush() -> None:
        found.append(sorted(step for step, _ in place.list_checkpoints()))

    with RunCheckpointSaver(directory, plan, say=lambda text: None, flush=flush) as checkpoints:
        for step in train(state, plan, loss=mean_square):
            checkpoints.wait_for_saves()  # those of earlier steps
            checkpoints.save(state) if step.index < 3 else checkpoints.save_last(state)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_log_is_flushed_before_each_save_that_acknowledges_its_lines(ranks, tmp_path, mode):
    assert ranks(1).run(steps_saved_at_each_flush, tmp_path, mode)[0] == [[], [1], [1, 2]]
