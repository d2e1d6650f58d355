"""The order of samples: a permutation an epoch, another each epoch, a function of seed and index alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.packing import permute_pseudorandomly, shuffled_rows_at

laws = settings(max_examples=50)
lengths = st.one_of(st.integers(1, 70), st.integers(71, 2000))
seeds = st.integers(0, 2**64)


@laws
@given(lengths, st.text(max_size=8))
def test_permute_is_a_permutation(length: int, key: str):
    assert np.array_equal(
        np.sort(permute_pseudorandomly(np.arange(length), length=length, key=key)), np.arange(length)
    )


@laws
@given(st.integers(1, 300), seeds, st.integers(0, 10**6))
def test_every_epoch_shows_every_window_once(windows: int, seed: int, epoch: int):
    samples = np.arange(epoch * windows, (epoch + 1) * windows)
    assert np.array_equal(np.sort(shuffled_rows_at(samples, rows=windows, seed=seed)), np.arange(windows))


@laws
@given(st.integers(1, 300), seeds, st.integers(0, 10**9), st.integers(1, 700))
def test_a_sample_does_not_depend_on_the_samples_beside_it(windows: int, seed: int, first: int, count: int):
    samples = np.arange(first, first + count)
    together = shuffled_rows_at(samples, rows=windows, seed=seed)
    some = samples[:: max(count // 5, 1)]
    alone = [int(shuffled_rows_at(np.array([i]), rows=windows, seed=seed)[0]) for i in some]
    assert together[:: max(count // 5, 1)].tolist() == alone


def test_order_is_the_same_on_every_machine():
    assert shuffled_rows_at(np.arange(10), rows=10, seed=0).tolist() == [3, 6, 0, 1, 9, 7, 4, 2, 5, 8]


def test_epochs_and_seeds_differ():
    first, second = shuffled_rows_at(np.arange(200), rows=100, seed=0).reshape(2, 100)
    other = shuffled_rows_at(np.arange(100), rows=100, seed=1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_every_place_is_as_likely():
    """Chi-square over 2,000 keys, 40 × 40 (position, place): 1,521 degrees of freedom, 6 sigma allowed."""
    keys, length = 2000, 40
    counts = np.zeros((length, length))
    for key in range(keys):
        counts[np.arange(length), permute_pseudorandomly(np.arange(length), length=length, key=str(key))] += 1
    freedom = (length - 1) ** 2
    chi_square = ((counts - keys / length) ** 2 / (keys / length)).sum()
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
