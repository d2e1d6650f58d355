"""A resumed run equals the undisturbed run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.checkpoint import load, save
from fullshard.checkpoint.manifest import Manifest, SavedTensor
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import (
    changed_settings,
    check_can_continue,
    set_next_row_and_describe_changes,
    settings_that_affect_results,
)
from fullshard.training.shard import shard
from fullshard.training.state import TrainState, rows_taken_by_saved_state
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.training.runs import WIDTH, Regression, mean_square, meta, run_of, sharded, whole
from tests.training.same_numbers import STRATEGIES, build, make_run

STEPS = 8


def train_part(
    directory: Path, *, strategy: str, until: int, extra: list[str], model_name: str = "odd_tied"
) -> tuple[list[float], dict[str, Tensor]]:
    """Resumes from the newest checkpoint, trains to step `until`, saves. Returns losses and whole weights."""
    world_size = dist.get_world_size()
    run = make_run(
        model=model_name, ranks=world_size, strategy=strategy, extra=[f"train.steps={STEPS}", *extra]
    )
    plan = Plan.from_run(run, world_size=world_size)
    torch.manual_seed(123 + until)  # what stood in the generator before must not matter
    model = shard(build(model_name, run), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    resumed = load(state, directory, missing_ok=True)
    if not resumed:
        torch.manual_seed(5 + dist.get_rank())
    losses: list[float] = []
    steps = train(state, plan)
    while state.step < until:
        losses.append(next(steps).loss)
        losses[-1] += torch.rand(()).item() * 1e-9  # moves the random state, and shows it
    if until < STEPS:
        save(state, directory, plan=plan)
    return losses, whole(model)


def run_parts(
    ranks: Any, directory: Path, parts: list[tuple[int, str, int]], *extra: str, model: str = "odd_tied"
) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """Each part: (ranks, strategy, last step). Every rank's losses, all parts joined; the last weights."""
    curves: list[list[float]] = []
    weights: list[dict[str, Tensor]] = []
    for world_size, strategy, until in parts:
        results = ranks(world_size).run(part, directory, strategy, until, list(extra), model)
        losses = [losses for losses, _ in results]
        # A rank that was not there before has no curve of its own yet: all ranks have the same losses.
        before = curves[0] if curves else []
        curves = [(curves[rank] if rank < len(curves) else before) + own for rank, own in enumerate(losses)]
        weights = [parameters for _, parameters in results]
    return curves, weights


def part(directory: Path, strategy: str, until: int, extra: list[str], model: str) -> Any:
    return train_part(directory, strategy=strategy, until=until, extra=extra, model_name=model)


def test_resumed_run_equals_undisturbed_run_bitwise(ranks: Any, tmp_path: Path) -> None:
    assert_bitwise(ranks, tmp_path, "hybrid_shard", "bf16")


def assert_bitwise(ranks: Any, path: Path, strategy: str, precision: str) -> None:
    n = 4 if STRATEGIES[strategy] else 2
    mode = f"precision.mode={precision}"
    whole_curve, expected = run_parts(ranks, path / "whole", [(n, strategy, STEPS)], mode)
    parts = [(n, strategy, 3), (n, strategy, 7), (n, strategy, STEPS)]
    curve, stopped = run_parts(ranks, path / "parts", parts, mode)
    assert curve == whole_curve
    for name, tensor in stopped[0].items():
        assert torch.equal(tensor, expected[0][name]), name


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "full_shard", 2), (3, "full_shard", 4), (1, "full_shard", 7), (4, "full_shard", STEPS)],
        pytest.param(
            [(2, "full_shard", 3), (2, "no_shard", 6), (4, "hybrid_shard", STEPS)], marks=pytest.mark.long
        ),
        [(4, "full_shard", 3), (3, "zero1", 6), (4, "hybrid_shard_zero2", STEPS)],
    ],
    ids=["ranks 2→3→1→4", "full→no→hybrid", "full→zero1→hybrid_zero2"],
)
def test_a_run_resumes_on_other_rank_counts_and_strategies(
    parts: list[tuple[int, str, int]], ranks: Any, tmp_path: Path
) -> None:
    whole_curve, expected = run_parts(ranks, tmp_path / "whole", [(1, "no_shard", STEPS)])
    curve, moved = run_parts(ranks, tmp_path / "parts", parts)
    assert curve[0] == pytest.approx(whole_curve[0], rel=1e-5)
    for name, tensor in moved[0].items():
        error = (tensor - expected[0][name]).norm() / expected[0][name].norm()
        assert error <= 1e-5, name


# Changed settings, and rows #
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
    messages = set_next_row_and_describe_changes(other, new_plan)
    steps = train(other, new_plan, loss=mean_square)
    next(steps), next(steps)
    assert set_next_row_and_describe_changes(other, new_plan) == []
    return state.data.used + other.data.used, messages


@pytest.mark.parametrize("batch", [6, 8, 12, 24])
def test_changed_batch_continues_after_the_seen_rows(batch: int, ranks: Any, tmp_path: Path) -> None:
    after = [f"train.global_batch={batch}"]
    used, messages = ranks(1).run(rows_used, tmp_path, [], after, ByRow)[0]
    assert used == list(range(3 * 12 + 2 * batch))
    assert len(messages) == (0 if batch == 12 else 2)


def test_data_addressed_by_step_skips_to_the_next_batch_and_this_is_reported(
    ranks: Any, tmp_path: Path
) -> None:
    after = ["train.global_batch=8", "optimizer.learning_rate=2e-2"]
    used, (settings, rows) = ranks(1).run(rows_used, tmp_path, [], after, ByStep)[0]
    assert used == [*range(36), *range(40, 56)]
    assert settings.splitlines()[1:] == [
        "  optimizer.learning_rate 0.01 -> 0.02",
        "  train.global_batch 12 -> 8",
        "  so the settings give step 4 the learning rate 0.0155",
    ]
    assert rows.startswith("4 rows of the data are skipped")


class Reseeded(ByStep):
    @property
    def row_order(self) -> str:
        return str(id(self))


class Revalidated(ByStep):
    @property
    def validation_digest(self) -> str:
        return str(id(self))


def test_other_validation_data_is_reported_and_is_no_other_order_of_the_rows(
    ranks: Any, tmp_path: Path
) -> None:
    _, messages = ranks(1).run(rows_used, tmp_path, [], [], Revalidated)[0]
    assert [message.partition(":")[0] for message in messages] == [
        "the validation data changed, so its losses cannot be compared with earlier ones"
    ]


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
    assert set_next_row_and_describe_changes(state, plan) == [], "its iterator continues"
    fresh, _ = sharded(run_of(), data=state.data)
    load(fresh, directory)
    return set_next_row_and_describe_changes(fresh, plan)


def test_iterable_that_starts_anew_is_reported(ranks: Any, tmp_path: Path) -> None:
    ((message,),) = ranks(1).run(seen_again, tmp_path)
    assert "12 rows comes again" in message


def test_only_settings_that_change_results_are_compared() -> None:
    run = Run.load(overrides=["precision.mode=bf16"])
    same = ["run.dir=x", "run.ranks=3", "sharding.strategy=zero1", "train.microbatch=1", "data.cache=x"]
    before = run.model_dump(mode="json")
    assert (
        changed_settings(
            before, settings_that_affect_results(run.with_overrides([*same, "precision.mode=auto"]))
        )
        == {}
    )
    others = ["run.seed=1", "data.sequence_length=32", "schedule.kind=linear", "model.layers=3"]
    assert changed_settings(before, settings_that_affect_results(run.with_overrides(others))).keys() == {
        one.partition("=")[0] for one in others
    }


def test_checkpoints_that_count_no_rows_are_placed_by_the_batch_of_their_run() -> None:
    values = {"step": 5}
    assert rows_taken_by_saved_state(values) is None
    assert rows_taken_by_saved_state({**values, "run": {"train": {"global_batch": 8}}}) == 40
    assert rows_taken_by_saved_state({**values, "rows": 44}) == 44


def test_a_run_with_another_model_or_optimizer_is_refused_by_its_settings() -> None:
    run, shape = Run.load(), tuple(meta(Regression).head.weight.shape)

    def check(*now: str, saved_shape: tuple[int, ...] = shape) -> None:
        manifest = Manifest(
            step=3,
            values={"run": settings_that_affect_results(run)},
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
