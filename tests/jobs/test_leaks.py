"""Live bytes that grow steadily are a leak; a filled cache, a save and collected garbage are not."""

import random

from hypothesis import given
from hypothesis import strategies as st

from fullshard.observe.memory_watch import LEAST_BYTES, SKIPPED_STEPS, STEPS, LeakDetector

MIB = 1 << 20


def growth(values: list[int]) -> float:
    detector = LeakDetector()
    for value in values:
        detector.add_step(value)
    return detector.growth_per_step()


@given(st.integers(0, 10**12), st.integers(2 * LEAST_BYTES, 100 * MIB), st.integers(0, 2**32))
def test_a_steady_leak_is_named_within_80_steps(held: int, per_step: int, seed: int):
    spikes = random.Random(seed)
    # Rare work holds memory at the end of some steps, and gives it back.
    values = [held + step * per_step + (spikes.random() < 0.1) * 500 * MIB for step in range(80)]
    assert 0.5 * per_step <= growth(values) <= 2 * per_step


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.integers(0, SKIPPED_STEPS + STEPS))
def test_one_buffer_that_stays_is_no_leak(held: int, size: int, step: int):
    assert growth([held] * step + [held + size] * (SKIPPED_STEPS + STEPS - step)) == 0


@given(st.integers(1, 10 * MIB), st.integers(10, 50))
def test_memory_that_is_freed_every_so_often_is_no_leak(per_step: int, every: int):
    values = [step % every * per_step for step in range(200)]
    assert all(growth(values[:end]) == 0 for end in range(STEPS, 200, 7))


def test_noise_is_no_leak():
    noise = random.Random(1)
    assert not any(growth([noise.randrange(50 * MIB) for _ in range(200)]) for _ in range(100))


def test_a_run_that_goes_back_is_judged_anew():
    detector = LeakDetector()
    for step in range(SKIPPED_STEPS + STEPS):
        detector.add_step(step * MIB)
    detector.forget()
    assert detector.growth_per_step() == 0
