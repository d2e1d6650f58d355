"""Latency and bandwidth come back out of the seconds that they make."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.jobs.calibrate.collectives import CollectiveSample, fit_collective_rate

SIZES = (2**12, 2**16, 2**20, 2**24)


@given(
    latency=st.floats(0, 1e-2), bytes_per_second=st.floats(1e6, 1e12), ranks=st.sampled_from([2, 3, 8, 64])
)
def test_what_follows_the_formula_is_found_again(latency: float, bytes_per_second: float, ranks: int):
    def seconds(size: int) -> float:
        return latency + size * (ranks - 1) / ranks / bytes_per_second

    rate, error = fit_collective_rate([CollectiveSample(size, seconds(size)) for size in SIZES], ranks=ranks)
    assert error < 1e-3
    line = rate.model_copy(update={"curve": None})
    for size in (2**14, 2**22):
        assert line.predict_seconds(size, ranks) == pytest.approx(seconds(size), rel=1e-3)


def test_the_error_is_the_largest_relative_one():
    samples = [
        CollectiveSample(size, (1e-4 + size / 1e9) * (1.2 if size == 2**20 else 1.0)) for size in SIZES
    ]
    rate, error = fit_collective_rate(samples, ranks=2)
    line = rate.model_copy(update={"curve": None})
    assert error == pytest.approx(
        max(abs(line.predict_seconds(s.whole_bytes, 2) / s.seconds - 1) for s in samples)
    )
    assert 0.05 < error < 0.2
    for sample in samples:
        assert rate.predict_seconds(sample.whole_bytes, 2) == pytest.approx(sample.seconds, rel=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_whatever_was_measured_gives_no_negative_figure(seconds: list[float]):
    samples = [CollectiveSample(2 ** (12 + i), one) for i, one in enumerate(seconds)]
    rate, _ = fit_collective_rate(samples, ranks=4)
    taken = [rate.predict_seconds(sample.whole_bytes, 4) for sample in samples]
    assert all(less <= more * 1.001 for less, more in itertools.pairwise(taken))
    assert rate.hop_seconds >= 0
    assert rate.bytes_per_second > 0
