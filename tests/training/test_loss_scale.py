"""The dynamic loss scale, and a run in fp16 that overflows."""

from typing import Any

from fullshard.training.loop import train
from fullshard.training.state import LossScale
from tests.training.runs import mean_square, run_of, sharded


def test_an_overflow_halves_the_scale_but_not_below_one() -> None:
    scale = LossScale(4.0, window=10)
    seen = []
    for _ in range(4):
        scale.update(finite=False)
        seen.append(scale.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0]


def test_the_scale_doubles_after_a_window_of_good_steps_in_a_row() -> None:
    scale = LossScale(8.0, window=3)
    outcomes = [True, True, False, True, True, True, True, True, True]
    seen = []
    for finite in outcomes:
        scale.update(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_a_window_that_was_shortened_counts_at_once() -> None:
    scale = LossScale(8.0, window=3, good_steps=5)
    scale.update(finite=True)
    assert (scale.scale, scale.good_steps) == (16.0, 0)


def test_no_scaling_never_moves() -> None:
    scale = LossScale()
    for finite in (True, True, False):
        scale.update(finite=finite)
        assert scale == LossScale(1.0, window=0, good_steps=0)


def overflowing_run() -> list[tuple[bool, float, float]]:
    """(skipped, scale after the step, norm) of every step."""
    state, plan = sharded(run_of("precision.mode=fp16", "train.max_skipped_steps=30", "train.steps=30"))
    state.loss_scale = LossScale(2.0**25, window=4)  # over fp16's 65504 by 2^9
    return [
        (step.skipped, state.loss_scale.scale, step.grad_norm)
        for step in train(state, plan, loss=mean_square)
    ]


def test_overflow_in_fp16_is_skipped_on_all_ranks_until_the_scale_fits(ranks: Any) -> None:
    first, *others = ranks(3).run(overflowing_run)
    assert all([step[:2] for step in other] == [step[:2] for step in first] for other in others)
    skipped, scales, norms = zip(*first, strict=True)
    recovered = skipped.index(False)
    assert recovered >= 5
    assert scales[:recovered] == tuple(2.0 ** (24 - i) for i in range(recovered))
    # From there it only doubles after 4 good steps, and halves when that was too much.
    scale, good = scales[recovered - 1], 0
    for was_skipped, after in zip(skipped[recovered:], scales[recovered:], strict=True):
        good = 0 if was_skipped else good + 1
        scale = scale / 2 if was_skipped else scale * (2 if good == 4 else 1)
        good = 0 if good == 4 else good
        assert after == scale
    assert sum(skipped[recovered:]) >= 1
    assert all(norm < 100 for norm, was_skipped in zip(norms, skipped, strict=True) if not was_skipped)


def unscaled_after_fp16() -> float:
    state, plan = sharded(run_of())
    state.loss_scale = LossScale(1024.0, window=7)
    next(train(state, plan, loss=mean_square))
    return state.loss_scale.scale


def test_a_scale_that_fp16_left_behind_ends_with_it(ranks: Any) -> None:
    assert ranks(1).run(unscaled_after_fp16) == [1.0]
