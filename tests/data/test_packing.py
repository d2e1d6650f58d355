"""Rows hold every token once, in as few rows as best-fit-decreasing needs, and labels follow their tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.packing import (
    LONGEST_PERIOD,
    TokenSpans,
    build_source_interleaving,
    pack_best_fit_decreasing,
    permute_pseudorandomly,
    shuffled_rows_at,
    split_long_spans,
    split_off_held_out,
)

laws = settings(max_examples=60)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def spans_of(sizes: list[int]) -> TokenSpans:
    """One behind the other, each from a multiple of 100 on."""
    return TokenSpans(np.arange(len(sizes)) * 100, np.array(sizes))


def all_places(spans: TokenSpans) -> list[int]:
    return [begin + i for begin, n in zip(spans.begins, spans.lengths, strict=True) for i in range(n)]


def naive_best_fit(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


@laws
@given(st.lists(st.integers(1, 20), min_size=1, max_size=200), st.integers(20, 30))
def test_best_fit_equals_a_naive_best_fit(lengths: list[int], capacity: int):
    order, offsets = pack_best_fit_decreasing(np.array(lengths), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    filled = np.add.reduceat(np.array(lengths)[order], offsets[:-1])
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    assert filled.max() <= capacity
    assert len(filled) == naive_best_fit(lengths, capacity)


@pytest.mark.parametrize("capacity", [512, 2048, 8192])
def test_stories_fill_over_99_percent(capacity: int):
    """Lengths as of short stories: log-normal around 200 tokens, some of them longer than a row."""
    lengths = np.random.default_rng(0).lognormal(5.3, 0.7, 20_000).astype(np.int64) + 8
    pieces, _ = split_long_spans(TokenSpans(np.cumsum(lengths) - lengths, lengths), capacity)
    _, offsets = pack_best_fit_decreasing(pieces.lengths, capacity)
    assert lengths.sum() / ((len(offsets) - 1) * capacity) >= 0.99


@laws
@given(sizes, st.floats(0, 0.9))
def test_every_token_is_trained_on_or_validated(sizes: list[int], fraction: float):
    spans = spans_of(sizes)
    training, held_out = split_off_held_out(spans.begins, spans.lengths, fraction=fraction)
    assert sorted(all_places(training) + all_places(held_out)) == all_places(spans)
    asked = round(fraction * sum(sizes))
    assert min(asked, max(sizes) - 1) // 2 <= held_out.token_count <= asked


def test_the_tail_of_a_single_document_is_validated():
    training, held_out = split_off_held_out(np.array([7]), np.array([100]), fraction=0.25)
    assert (training.begins.tolist(), training.lengths.tolist()) == ([7], [75])
    assert (held_out.begins.tolist(), held_out.lengths.tolist()) == ([82], [25])


weights = st.lists(st.integers(1, 50).map(lambda n: n / 10), min_size=1, max_size=5)


@laws
@given(weights)
def test_interleaved_sources_have_exact_shares_per_period_and_even_shares_within(weights: list[float]):
    pattern = build_source_interleaving(weights)
    shares = np.array(weights) / sum(weights)
    assert pattern.counts / len(pattern.sources) == pytest.approx(shares, rel=1e-12)
    seen = np.cumsum(pattern.sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(seen) + 1)[:, None] * shares
    assert np.abs(seen - wanted).max() <= (len(weights) + 1) / 2


def test_source_weights_are_rounded_to_the_longest_period():
    pattern = build_source_interleaving([0.123456789, 1 / 3])
    assert len(pattern.sources) == pytest.approx(LONGEST_PERIOD, abs=1)
    assert pattern.counts[0] / pattern.counts[1] == pytest.approx(0.123456789 * 3, rel=1e-4)
    assert pattern.rounded_share_messages() == []
    (message,) = build_source_interleaving([120_000_000, 12]).rounded_share_messages()
    assert message.startswith("source 2 gets 1e-05 of the sequences, although its weight is 1e-07 of all")


def test_mixture_is_the_same_on_every_machine():
    assert build_source_interleaving([0.5, 0.25, 0.25]).sources.tolist() == [0, 1, 2, 0]
    assert build_source_interleaving([0.7, 0.3]).sources.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


lengths = st.one_of(st.integers(1, 70), st.integers(71, 2000))


@laws
@given(lengths, st.text(max_size=8))
def test_permute_is_a_permutation(length: int, key: str):
    assert np.array_equal(
        np.sort(permute_pseudorandomly(np.arange(length), length=length, key=key)), np.arange(length)
    )


def test_order_is_the_same_on_every_machine():
    assert shuffled_rows_at(np.arange(10), rows=10, seed=0).tolist() == [3, 6, 0, 1, 9, 7, 4, 2, 5, 8]


def test_every_place_is_as_likely():
    """Chi-square over 2,000 keys, 40 × 40 (position, place): 1,521 degrees of freedom, 6 sigma allowed."""
    keys, length = 2000, 40
    counts = np.zeros((length, length))
    for key in range(keys):
        counts[np.arange(length), permute_pseudorandomly(np.arange(length), length=length, key=str(key))] += 1
    freedom = (length - 1) ** 2
    chi_square = ((counts - keys / length) ** 2 / (keys / length)).sum()
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
