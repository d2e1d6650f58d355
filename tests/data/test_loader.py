"""Prefetched batches are those without prefetching; an error is raised in its step; no thread is left."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.batches import MicrobatchPrefetcher
from fullshard.errors import DataError
from fullshard.spec.plan import Plan
from tests.data.samples import plan_of


@dataclass
class Numbers:
    """Yields (step, rank, index). `fails`: the step that raises."""

    fails: int | None = None
    asked: list[int] = field(default_factory=list)

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[int, int, int]]:
        self.asked.append(step)
        for i in range(plan.accumulation):
            if step == self.fails:
                raise DataError(f"step {step} is corrupt.")
            yield step, rank, i


@settings(max_examples=40)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 3), st.integers(1, 3))
def test_prefetching_changes_no_batch_in_any_order_of_steps(steps: list[int], ahead: int, accumulation: int):
    plan, plain = plan_of(2, 1, accumulation), Numbers()
    with MicrobatchPrefetcher(Numbers(), steps=ahead) as data:
        for step in steps:
            wanted = list(plain.microbatches(step, rank=1, plan=plan))
            assert list(data.microbatches(step, rank=1, plan=plan)) == wanted


def test_steps_in_order_are_made_once_and_not_further_ahead():
    numbers = Numbers()
    with MicrobatchPrefetcher(numbers, steps=2) as data:
        for step in range(5):
            list(data.microbatches(step, rank=0, plan=plan_of(1, 1)))
            assert max(numbers.asked) <= step + 2
    assert numbers.asked == sorted(set(numbers.asked))


def test_an_error_is_raised_in_its_own_step_alone():
    plan = plan_of(1, 1)
    with MicrobatchPrefetcher(Numbers(fails=2), steps=2) as data:
        for step in (0, 1):
            assert list(data.microbatches(step, rank=0, plan=plan)) == [(step, 0, 0)]
        with pytest.raises(DataError, match="step 2 is corrupt"):
            list(data.microbatches(2, rank=0, plan=plan))
        assert list(data.microbatches(3, rank=0, plan=plan)) == [(3, 0, 0)]


def test_no_thread_outlives_the_block():
    def running() -> int:
        return sum(one.name.startswith("fullshard-data") for one in threading.enumerate())

    with MicrobatchPrefetcher(Numbers(), steps=1) as data:
        list(data.microbatches(0, rank=0, plan=plan_of(1, 1)))
        assert running() == 1
    assert running() == 0
