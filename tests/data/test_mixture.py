"""Several sources in exact proportions, wherever one looks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.packing import LONGEST_PERIOD, build_source_interleaving

laws = settings(max_examples=50)
weights = st.lists(st.integers(1, 50).map(lambda n: n / 10), min_size=1, max_size=5)


@laws
@given(weights, st.integers(0, 10**6))
def test_any_sample_is_found_alone_and_each_source_counts_on(weights: list[float], first: int):
    pattern = build_source_interleaving(weights)
    numbers = np.arange(first, first + 2 * len(pattern.sources))
    sources, own = pattern.locate_samples(numbers)
    alone = [
        tuple(int(x[0]) for x in pattern.locate_samples(numbers[i : i + 1]))
        for i in range(0, len(numbers), 7)
    ]
    assert alone == list(zip(sources.tolist(), own.tolist(), strict=True))[::7]
    for source in range(len(weights)):
        counted = own[sources == source]
        assert counted.tolist() == list(range(counted[0], counted[0] + len(counted)))
    assert len(set(zip(sources.tolist(), own.tolist(), strict=True))) == len(numbers)


@laws
@given(weights)
def test_proportions_are_exact_in_a_period_and_even_within(weights: list[float]):
    pattern = build_source_interleaving(weights)
    shares = np.array(weights) / sum(weights)
    assert pattern.counts / len(pattern.sources) == pytest.approx(shares, rel=1e-12)
    seen = np.cumsum(pattern.sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(seen) + 1)[:, None] * shares
    assert np.abs(seen - wanted).max() <= (len(weights) + 1) / 2


def test_weights_that_need_a_long_period_are_rounded_to_the_longest():
    pattern = build_source_interleaving([0.123456789, 1 / 3])
    assert len(pattern.sources) == pytest.approx(LONGEST_PERIOD, abs=1)
    assert pattern.counts[0] / pattern.counts[1] == pytest.approx(0.123456789 * 3, rel=1e-4)


def test_order_is_the_same_on_every_machine():
    assert build_source_interleaving([0.5, 0.25, 0.25]).sources.tolist() == [0, 1, 2, 0]
    assert build_source_interleaving([0.7, 0.3]).sources.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
