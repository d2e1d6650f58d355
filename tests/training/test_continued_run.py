"""A run that continues: what is reported about its settings, and the rows of the data that follow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.checkpoint import load, save
from fullshard.checkpoint.manifest import Manifest, SavedTensor
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.resume import (
    changed_settings,
    check_can_continue,
    continue_run,
    result_settings,
)
from fullshard.training.state import rows_in_values
from tests.training.runs import WIDTH, Regression, mean_square, meta, run_of, sharded


class ByStep:
    """Row i is i everywhere. Records the rows that were used. Its step begins at a multiple of the batch."""

    row_order = "in order"

    def __init__(self) -> None:
        self.used: list[int] = []

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        return self.microbatches_at_row(step * plan.run.train.global_batch, rank=rank, plan=plan)

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(row, row + plan.run.train.global_batch, plan.microbatch):
            self.used += range(first, first + plan.microbatch)
            yield torch.ones(plan.microbatch, WIDTH), torch.ones(plan.microbatch, 2)


class ByRow(ByStep):
    takes_any_row = True


def rows_used(
    directory: Path, before: list[str], after: list[str], kind: type[ByStep]
) -> tuple[list[int], list[str]]:
    """Rows of three steps and of two that follow them, with other settings; and what is reported."""
    state, plan = sharded(run_of(*before), data=kind())
    for step in train(state, plan, loss=mean_square):
        if step.index == 3:
            break
    save(state, directory)  # without the plan
    other, new_plan = sharded(run_of(*after), data=kind())
    load(other, directory)
    messages = continue_run(other, new_plan)
    steps = train(other, new_plan, loss=mean_square)
    next(steps), next(steps)
    assert continue_run(other, new_plan) == []
    return state.data.used + other.data.used, messages


@pytest.mark.parametrize("batch", [6, 8, 12, 24])
def test_with_another_batch_a_run_continues_behind_the_rows_seen(
    batch: int, ranks: Any, tmp_path: Path
) -> None:
    after = [f"train.global_batch={batch}"]
    used, messages = ranks(1).run(rows_used, tmp_path, [], after, ByRow)[0]
    assert used == list(range(3 * 12 + 2 * batch))
    assert len(messages) == (0 if batch == 12 else 2)


def test_data_by_step_alone_skips_rows_up_to_a_step_and_this_is_reported(ranks: Any, tmp_path: Path) -> None:
    after = ["train.global_batch=8", "optimizer.learning_rate=2e-2"]
    used, (settings, rows) = ranks(1).run(rows_used, tmp_path, [], after, ByStep)[0]
    assert used == [*range(36), *range(40, 56)]
    assert "train.global_batch 12 -> 8" in settings
    assert "optimizer.learning_rate 0.01 -> 0.02" in settings
    assert rows.startswith("4 rows of the data are skipped")


class Reseeded(ByStep):
    @property
    def row_order(self) -> str:
        return str(id(self))


def test_another_order_of_the_rows_is_reported(ranks: Any, tmp_path: Path) -> None:
    cases = ((ByStep, [], 0), (ByStep, ["run.seed=5"], 1), (Reseeded, [], 1), (Reseeded, ["run.seed=5"], 2))
    for place, (kind, after, count) in enumerate(cases):
        _, messages = ranks(1).run(rows_used, tmp_path / str(place), [], after, kind)[0]
        assert len(messages) == count
        assert ("in another order" in " ".join(messages)) == (kind is Reseeded)


def seen_again(directory: Path) -> list[str]:
    state, plan = sharded(run_of(), data=[(torch.ones(12, WIDTH), torch.ones(12, 2))] * 6)
    next(steps := train(state, plan, loss=mean_square))
    save(state, directory)
    steps.close()  # type: ignore[attr-defined]
    load(state, directory)
    assert continue_run(state, plan) == [], "its iterator continues"
    fresh, _ = sharded(run_of(), data=state.data)
    load(fresh, directory)
    return continue_run(fresh, plan)


def test_that_an_iterable_starts_anew_is_reported(ranks: Any, tmp_path: Path) -> None:
    ((message,),) = ranks(1).run(seen_again, tmp_path)
    assert "12 rows comes again" in message


def test_only_settings_that_change_results_are_compared() -> None:
    run = Run.load(overrides=["precision.mode=bf16"])
    same = ["run.dir=x", "run.ranks=3", "sharding.strategy=zero1", "train.microbatch=1", "data.cache=x"]
    before = run.model_dump(mode="json")
    assert changed_settings(before, result_settings(run.with_overrides([*same, "precision.mode=auto"]))) == {}
    others = ["run.seed=1", "data.sequence_length=32", "schedule.kind=linear", "model.layers=3"]
    assert changed_settings(before, result_settings(run.with_overrides(others))).keys() == {
        one.partition("=")[0] for one in others
    }


def test_checkpoints_that_count_batches_are_placed_by_the_batch_of_their_run() -> None:
    values = {"step": 5, "data_offset": 2}
    assert rows_in_values(values) is None
    assert rows_in_values({**values, "run": {"train": {"global_batch": 8}}}) == 56
    assert rows_in_values({**values, "rows": 40}) == 40


def test_a_run_with_another_model_or_optimizer_is_refused_by_its_settings() -> None:
    run, shape = Run.load(), tuple(meta(Regression).head.weight.shape)

    def check(*now: str, saved_shape: tuple[int, ...] = shape) -> None:
        manifest = Manifest(
            step=3,
            values={"run": result_settings(run)},
            tensors={"model.head.weight": SavedTensor(shape=saved_shape, dtype="float32")},
            files={},
            world_size=1,
            torch_version="",
            fullshard_version="",
        )
        check_can_continue(run.with_overrides(now), meta(Regression), manifest=manifest)

    check("optimizer.learning_rate=1", "model.layers=3")
    with pytest.raises(CheckpointError, match=r"model\.d_model 320 -> 640"):
        check("model.d_model=640", saved_shape=(2, 9))
    with pytest.raises(CheckpointError, match=r"optimizer\.name adamw -> sgd"):
        check("optimizer.name=sgd")
