"""Spikes of the loss are detected from earlier steps, and skipped or rolled back on all ranks alike."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard.checkpoint import load, save
from fullshard.checkpoint.results import EvaluationResult
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.survival.spikes import SIGMA, WINDOW, RecentSteps
from fullshard.training.loop import Step, train
from fullshard.training.resume import roll_back
from tests.training.runs import BATCH, Pairs, local_bits, mean_square, run_of, same_bits, sharded

HALF = WINDOW // 2


def recent(*losses: float) -> RecentSteps:
    """Steps with these losses, and norms of 1, all of them accepted."""
    steps, one = RecentSteps(), torch.ones((), dtype=torch.float64)
    for loss in losses:
        steps.add_step(loss * one, one, accepted=one > 0)
    return steps


def is_spike(steps: RecentSteps, loss: float, norm: float = 1.0) -> bool:
    values = torch.tensor([loss, norm], dtype=torch.float64)
    return bool(steps.is_spike(*values))


# Detection


def test_loss_and_norm_are_judged_by_separate_windows() -> None:
    steps = recent(*[3.0, 5.0] * (HALF // 2))  # mean 4, deviation 1; the norms are flat at 1
    assert not is_spike(steps, 10.0)
    assert is_spike(steps, 10.01)
    assert not is_spike(steps, -100.0, 1.006)
    assert is_spike(steps, 4.0, 1.0061)


@settings(max_examples=20)
@given(st.lists(st.floats(0.1, 10), min_size=HALF - 2, max_size=WINDOW + 8), st.floats(0.1, 60))
def test_steps_beyond_the_window_do_not_count(losses: list[float], new: float) -> None:
    steps = recent(*losses)
    assert (steps.losses, steps.norms) == (losses[-WINDOW:], [1.0] * len(losses[-WINDOW:]))
    again = RecentSteps(steps.losses, steps.norms)
    assert is_spike(steps, new) == is_spike(again, new)
    before = losses[-WINDOW:]
    threshold = fmean(before) + SIGMA * max(pstdev(before), 1e-3 * fmean(before))
    if abs(new - threshold) > 1e-9:
        assert is_spike(steps, new) == (len(before) >= HALF and new > threshold)


# Skips and rollbacks


class SomeSpike(Pairs):
    """Batches `bad` have targets far off, on the last rank alone. Notes which batches were used."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.used: list[int] = []

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        self.used.append(step)
        for x, y in super().microbatches(step, rank=rank, plan=plan):
            far = step in self.bad and rank == plan.world_size - 1
            yield x, y + (1000.0 if far else 0.0)


def spiky(kind: str, *bad: int) -> Any:
    """A run with half a window of steps behind it, so that its first step is judged."""
    run = run_of("train.steps=12", f"fault_tolerance.on_spike={kind}")
    state, plan = sharded(run, data=SomeSpike(*bad))
    state.recent = RecentSteps([1.0, 100.0] * (HALF // 2), [1.0, 100.0] * (HALF // 2))
    return state, plan


def skipping() -> tuple[list[bool], list[bool], tuple[int, int]]:
    state, plan = spiky("skip", 6, 9)
    skipped, touched, before = [], [], local_bits(state)
    for step in train(state, plan, loss=mean_square):
        after = local_bits(state)
        assert step.spike == step.skipped
        assert not step.rollback
        skipped.append(step.skipped)
        touched.append(not same_bits(before, after))
        before = after
    return skipped, touched, (state.skipped, len(state.recent.losses))


def test_a_spike_on_one_rank_is_left_out_on_all(ranks: Any) -> None:
    expected = [index in (6, 9) for index in range(12)]
    for skipped, touched, counts in ranks(2).run(skipping):
        assert skipped == expected
        assert touched == [not one for one in expected], "parameters and optimizer, bit for bit"
        assert counts == (2, HALF + 10)


def only_noted() -> tuple[int, list[float]]:
    state, plan = spiky("none", 6)
    losses = [step.loss for step in train(state, plan, loss=mean_square)]
    assert len(state.recent.losses) == HALF
    return state.skipped, losses


def test_by_default_a_spike_is_trained_on(ranks: Any) -> None:
    skipped, losses = ranks(2).run(only_noted)[0]
    assert skipped == 0
    assert losses[6] > 100 * losses[5]


def rolling_back(directory: Path, bad: tuple[int, ...]) -> Any:
    """Saves after every fourth step. Returns the batch of each step, rollbacks and the place in the data."""
    state, plan = spiky("rollback", *bad)
    kept: dict[int, int] = {}  # step -> the batch that it was trained on
    steps, went_back_to = train(state, plan, loss=mean_square), []
    while (step := next(steps, None)) is not None:
        if step.rollback:
            went_back = roll_back(state, directory, plan=plan)
            went_back_to.append(state.step if went_back else None)
            steps = train(state, plan, loss=mean_square)
            continue
        kept[step.index] = state.data.used[-1]
        if step.index % 4 == 0:
            save(state, directory, plan=plan)
    return kept, went_back_to, (state.rows, state.rollbacks), state.values()


def test_after_a_rollback_no_batch_since_the_checkpoint_is_used_again(ranks: Any, tmp_path: Path) -> None:
    """The spike is in batch 6, the checkpoint has steps 1 to 4, which took batches 0 to 3."""
    for kept, went_back_to, counts, _ in ranks(2).run(rolling_back, tmp_path, (6,)):
        assert went_back_to == [4]
        assert [kept[step] for step in range(1, 13)] == [0, 1, 2, 3, *range(7, 15)]
        assert counts == (15 * BATCH, 1)


def test_without_a_checkpoint_the_step_is_left_out(ranks: Any, tmp_path: Path) -> None:
    for kept, went_back_to, _, _ in ranks(2).run(rolling_back, tmp_path, (3,)):
        assert went_back_to == [None]
        assert list(kept.values()) == [0, 1, 2, *range(4, 12)]


def too_often(directory: Path) -> tuple[str, int]:
    with pytest.raises(TrainError) as raised:
        rolling_back(directory, tuple(range(6, 40)))
    return raised.value.what, raised.value.exit_code


def test_the_run_ends_after_too_many_rollbacks(ranks: Any, tmp_path: Path) -> None:
    what = "the run was rolled back 3 times, and spikes again at step 5."
    assert ranks(2).run(too_often, tmp_path) == [(what, 8)] * 2


def not_finite(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mean_square(model, batch) * torch.nan


def asks_for_a_rollback() -> list[tuple[bool, bool]]:
    run = run_of("train.max_skipped_steps=2", "fault_tolerance.on_spike=rollback")
    state, plan = sharded(run)
    steps = train(state, plan, loss=not_finite)
    return [(step.skipped, step.rollback) for step in (next(steps), next(steps))]


def test_losses_that_stay_not_finite_roll_back(ranks: Any) -> None:
    assert ranks(1).run(asks_for_a_rollback) == [[(True, False), (True, True)]]


# Checkpoints


def resumed(directory: Path) -> tuple[Any, Any, list[Step], list[Step]]:
    """A run that stops after a skipped spike, and the rest of it after a load and without one."""
    state, plan = spiky("skip", 7, 9)
    state.rows, state.rollbacks, state.best = 2 * BATCH, 1, {"a.loss": EvaluationResult(0.25, 3)}
    steps = train(state, plan, loss=mean_square)
    for _ in range(6):
        next(steps)
    save(state, directory, plan=plan)
    other, _ = spiky("skip", 7, 9)
    load(other, directory)
    values = other.values(), state.values()
    return *values, list(train(other, plan, loss=mean_square)), list(steps)


def test_a_resumed_run_skips_the_steps_of_an_uninterrupted_one(ranks: Any, tmp_path: Path) -> None:
    for other, own, after, straight in ranks(2).run(resumed, tmp_path):
        groups = "parameter_groups"  # known from the first step on
        assert other | {groups: None} == own | {groups: None}
        assert (own["rows"], own["rollbacks"]) == (8 * BATCH, 1)
        assert own["best"] == {"a.loss": {"value": 0.25, "step": 3, "data": None}}
        assert [one.loss for one in after] == [one.loss for one in straight]
        assert [one.index for one in after if one.spike] == [8], "batch 9, two on"


def older() -> tuple[int, int, Any]:
    state, _ = sharded(run_of())
    values = {k: v for k, v in state.values().items() if not k.startswith(("row", "roll", "best", "rec"))}
    state.rows, state.best = 3, {"a.loss": EvaluationResult(1.0, 1)}
    state.load_values(values, {})
    return state.rows, state.rollbacks, state.best


def test_older_checkpoints_load_without_spike_state(ranks: Any) -> None:
    assert ranks(1).run(older) == [(None, 0, {})]
