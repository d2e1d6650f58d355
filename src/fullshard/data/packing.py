"""Packs documents into rows of one length, and computes the order of the rows.

A place is the index of a token in the stream.

[Note: what is held out]
Documents are visited in a pseudorandom order that depends only on their number, and held out whole as long as
they do not exceed the fraction of all tokens. If they are few and large, so that less than half of the
fraction is filled, the tail of the largest other document fills the rest.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullshard.data.token_store import Integers

Packing = Literal["concat", "best_fit", "none"]
Int64 = NDArray[np.int64]

NO_LABEL = -1
"""Place of a label that does not exist."""

GAP = -1
"""First place of a piece without tokens: it leaves as many places of the row empty as its length."""

Piece = tuple[int, int, int]
"""(first place, number of tokens, place of the last token's label or NO_LABEL) of a piece of a document."""

LONGEST_PERIOD = 100_000
_ROUNDS = 4


@dataclass(frozen=True)
class TokenSpans:
    """Parts of the stream, such as documents.

    begins: first place of each part
    lengths: number of tokens of each part
    """

    begins: Int64
    lengths: Int64

    def select_spans(self, which: Integers) -> "TokenSpans":
        return TokenSpans(self.begins[which], self.lengths[which])

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum())


def split_off_held_out(
    begins: Int64, lengths: Int64, *, fraction: float, may_cut: bool = True
) -> tuple[TokenSpans, TokenSpans]:
    """Returns (training spans, held-out spans) with about `fraction` of the tokens held out.

    begins, lengths: of the documents
    may_cut: whether the tail of a document may be held out. If not, at least one of several documents is.

    See [Note: what is held out].
    """
    everything = TokenSpans(begins, lengths)
    budget = round(fraction * int(lengths.sum()))
    order = permute_pseudorandomly(np.arange(len(lengths)), length=len(lengths), key="hold out")
    out = np.zeros(len(lengths), dtype=np.bool_)
    out[order[np.cumsum(lengths[order]) <= budget]] = True
    if not may_cut and fraction and len(lengths) > 1:
        out[order[0]] = True
    left = budget - int(lengths[out].sum())
    training, held_out = everything.select_spans(~out), everything.select_spans(out)
    if 2 * left <= budget or not training.token_count or not may_cut:
        return training, held_out
    # Held-out documents fill less than half of the budget: cut the largest so that both parts have tokens.
    largest = int(np.argmax(training.lengths))
    left = min(left, int(training.lengths[largest]) - 1)
    if left < 1:
        return training, held_out
    tail = training.begins[largest] + training.lengths[largest] - left
    training.lengths[largest] -= left
    return training, TokenSpans(np.append(held_out.begins, tail), np.append(held_out.lengths, left))


@dataclass(frozen=True)
class ConcatenatedRows:
    """Rows of the packing `concat`: spans are joined, and every S + 1 tokens are a row and its last label.

    Rows start S tokens apart. A tail shorter than S + 1 tokens is dropped.

    begins: place in the stream where each span begins
    offsets: index in the joined tokens where each span begins, and the end of the last
    sequence_length: tokens per row, S
    masked: whether labels across document boundaries are left out
    """

    begins: Integers
    offsets: Integers
    sequence_length: int
    masked: bool

    @property
    def row_count(self) -> int:
        return max(int(self.offsets[-1]) - 1, 0) // self.sequence_length

    @property
    def token_count(self) -> int:
        return self.row_count * self.sequence_length

    def iterate_row_pieces(self, row: int) -> Iterator[Piece]:
        """Yields the pieces of row number `row`. With `masked`, no label is in the next document."""
        place, end = row * self.sequence_length, (row + 1) * self.sequence_length
        span = int(np.searchsorted(self.offsets, place, side="right")) - 1
        while place < end:
            behind = int(self.offsets[span + 1])
            begin, length = int(self.begins[span]) + place - int(self.offsets[span]), min(behind, end) - place
            place += length
            if place < behind:
                label = begin + length
            else:
                span += 1
                label = NO_LABEL if self.masked else int(self.begins[span])
            yield begin, length, label


@dataclass(frozen=True)
class PaddedRows:
    """Rows of the packings `best_fit` and `none`: row i holds pieces[offsets[i]:offsets[i + 1]] and padding.

    The label of a piece's last token is the next token of the document, if the document continues after the
    piece. Otherwise it has no label.

    begins: place in the stream where each piece begins
    lengths: number of tokens of each piece
    open: whether the document continues after the piece
    offsets: index of each row's first piece, and the number of pieces
    token_count: number of tokens in all rows, excluding padding
    """

    begins: Integers
    lengths: Integers
    open: Integers
    offsets: Integers
    token_count: int

    @property
    def row_count(self) -> int:
        return len(self.offsets) - 1

    def iterate_row_pieces(self, row: int) -> Iterator[Piece]:
        """Yields the pieces of row number `row`."""
        for i in range(int(self.offsets[row]), int(self.offsets[row + 1])):
            begin, length = int(self.begins[i]), int(self.lengths[i])
            yield begin, length, begin + length if self.open[i] else NO_LABEL


Rows = ConcatenatedRows | PaddedRows
"""Rows of one length, of the training or the held-out part."""


def pack_spans(spans: TokenSpans, *, packing: Packing, sequence_length: int) -> dict[str, Integers]:
    """Packs `spans` into rows. Returns the arrays from which `build_rows_from_arrays` builds them."""
    if packing == "concat":
        return {"begins": spans.begins, "offsets": np.append(0, np.cumsum(spans.lengths)).astype(np.int64)}
    pieces, continues = split_long_spans(spans, sequence_length)
    if packing == "best_fit":
        order, offsets = pack_best_fit_decreasing(pieces.lengths, sequence_length)
        pieces, continues = pieces.select_spans(order), continues[order]
    else:
        offsets = np.arange(len(pieces.lengths) + 1)
    lengths = pieces.lengths.astype(np.int32)
    return {"begins": pieces.begins, "lengths": lengths, "open": continues, "offsets": offsets}


def pack_pairs(spans: TokenSpans, chosen_lengths: Int64, *, half: int) -> dict[str, Integers]:
    """Packs each pair of documents into the halves of a row. Cuts tokens beyond a half.

    spans: both documents of each pair, joined
    chosen_lengths: number of tokens of the first document of each pair
    half: tokens of half a row

    Returns arrays as `pack_spans` does.
    """
    begins = np.stack([spans.begins, np.full_like(spans.begins, GAP), spans.begins + chosen_lengths], axis=1)
    whole = np.stack([chosen_lengths, spans.lengths - chosen_lengths], axis=1)
    chosen, rejected = np.minimum(whole, half).T
    lengths = np.stack([chosen, half - chosen, rejected], axis=1).astype(np.int32)
    continues = np.insert(whole > half, 1, False, axis=1)
    offsets = 3 * np.arange(len(begins) + 1)
    return {
        "begins": begins.ravel(),
        "lengths": lengths.ravel(),
        "open": continues.ravel(),
        "offsets": offsets,
    }


def count_tokens_in_row_arrays(arrays: Mapping[str, Integers]) -> int:
    """Returns the tokens in the arrays of `pack_spans`; with `concat`, including the tail."""
    if "lengths" not in arrays:
        return int(arrays["offsets"][-1])
    return int(arrays["lengths"][arrays["begins"] != GAP].sum(dtype=np.int64))


def build_rows_from_arrays(
    arrays: Mapping[str, Integers], *, tokens: int, sequence_length: int, masked: bool
) -> Rows:
    """Builds rows from the arrays of `pack_spans`, which may be memory maps.

    tokens: number of tokens in the arrays, see `count_tokens_in_row_arrays`
    masked: whether labels across document boundaries are left out
    """
    if "lengths" not in arrays:
        return ConcatenatedRows(arrays["begins"], arrays["offsets"], sequence_length, masked)
    return PaddedRows(**arrays, token_count=tokens)


def split_long_spans(spans: TokenSpans, length: int) -> tuple[TokenSpans, NDArray[np.bool_]]:
    """Splits each span into pieces of `length` tokens and a remainder.

    Returns (the pieces, whether the span continues after each). A remainder of one token is dropped, since it
    has no label; it is the label of the piece before, if there is one.
    """
    counts = -(-spans.lengths // length)
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(first, counts)  # index of the piece within its span
    lengths = np.minimum(np.repeat(spans.lengths, counts) - within * length, length)
    continues = within < np.repeat(counts, counts) - 1
    kept = (lengths > 1) | continues
    pieces = TokenSpans(np.repeat(spans.begins, counts) + within * length, lengths)
    return pieces.select_spans(kept), continues[kept]


def pack_best_fit_decreasing(lengths: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Packs pieces of these `lengths` into rows of `capacity` tokens, by best-fit-decreasing.

    Pieces are placed from longest to shortest, each into the fullest row that has room for it. Returns
    (indices of the pieces, row by row; position of each row's first piece among them, and their number).

    Pieces of equal length are placed together: a row with room r takes r // length of them, as it would one
    by one. So the cost is O(n log n) in numpy and O(lengths × rooms) in Python. For many pieces it needs at
    most 11/9 of the fewest possible rows (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows, room, rooms = 0, dict[int, list[Int64]](), list[int]()  # room -> the rows with this room
    values, first, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    for length, begin, count in zip((-values).tolist(), first.tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                space = rooms[place]
                found = room[space].pop()
                if not room[space]:
                    del room[space], rooms[place]
            else:
                space = capacity
                found = np.arange(rows, rows - (-left // (capacity // length)))
                rows += len(found)
            each = space // length
            used = min(len(found), -(-left // each))
            if used < len(found):
                _add_rows_by_room(room, rooms, space=space, rows=found[used:])
            taken = min(left, used * each)
            at = begin + count - left
            row_of[at : at + taken] = np.repeat(found[:used], each)[:taken]
            left -= taken
            full = used if taken == used * each else used - 1
            _add_rows_by_room(room, rooms, space=space - each * length, rows=found[:full])
            rest = taken - full * each
            _add_rows_by_room(room, rooms, space=space - rest * length, rows=found[full:used])
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return order[by_row], offsets.astype(np.int64)


def _add_rows_by_room(room: dict[int, list[Int64]], rooms: list[int], *, space: int, rows: Int64) -> None:
    """Adds `rows`, which have room for `space` more tokens, to `room` and its sorted keys `rooms`."""
    if not space or not len(rows):
        return
    if space not in room:
        room[space] = []
        insort(rooms, space)
    room[space].append(rows)


@dataclass(frozen=True, eq=False)
class SourceInterleaving:
    """A repeating pattern of sources: sample i is from the source at position i % len(sources).

    sources: source of each position
    index_within_source: for each position, the number of earlier positions with the same source
    counts: number of positions of each source in the pattern
    weights: the weights that were asked for
    """

    sources: NDArray[np.int64]
    index_within_source: NDArray[np.int64]
    counts: NDArray[np.int64]
    weights: tuple[float, ...]

    def locate_samples(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (source of each sample, number of earlier samples from the same source)."""
        rounds, positions = np.divmod(samples, len(self.sources))
        sources = self.sources[positions]
        return sources, rounds * self.counts[sources] + self.index_within_source[positions]

    @property
    def source_shares(self) -> list[float]:
        """Fraction of the samples that come from each source."""
        return (self.counts / self.counts.sum()).tolist()

    def rounded_share_messages(self) -> list[str]:
        """Returns a message for each source whose share is more than 1 % off, because it was rounded."""
        asked = [weight / sum(self.weights) for weight in self.weights]
        return [
            f"source {number} gets {used:.3g} of the sequences, although its weight is {share:.3g} of all: "
            f"weights are rounded, because their order repeats after {len(self.sources):,} sequences"
            for number, (used, share) in enumerate(zip(self.source_shares, asked, strict=True), start=1)
            if abs(used / share - 1) > 0.01
        ]


def build_source_interleaving(weights: Sequence[float]) -> SourceInterleaving:
    """Returns the pattern that mixes sources by `weights`: exact in every period, evenly spread within it.

    Sample j of a source with n samples per period is at time (2 j + 1) / 2 n. Among the first k samples, for
    any k, each source has its share to within (sources + 1) / 2 samples. The period is the smallest one in
    which the weights, as written, give whole samples. If that exceeds LONGEST_PERIOD, the counts are the
    nearest whole numbers for LONGEST_PERIOD, at least 1.
    """
    counts = np.array(_samples_per_period(weights), dtype=np.int64)
    numbers = [np.arange(count) for count in counts]
    sources = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(2 * each + 1) / (2 * len(each)) for each in numbers])
    order = np.lexsort((sources, times))
    return SourceInterleaving(sources[order], np.concatenate(numbers)[order], counts, tuple(weights))


def _samples_per_period(weights: Sequence[float]) -> list[int]:
    exact = [Fraction(repr(weight)) for weight in weights]
    multiple = lcm(*(one.denominator for one in exact))
    counts = [int(one * multiple) for one in exact]
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    if total <= LONGEST_PERIOD:
        return counts
    return [max(1, round(Fraction(count, total) * LONGEST_PERIOD)) for count in counts]


def shuffled_rows_at(samples: NDArray[np.int64], *, rows: int, seed: int | str) -> NDArray[np.int64]:
    """Returns the shuffled row number of each sample, for a source with `rows` rows.

    Sample i is position i % rows of epoch i // rows. An epoch contains every row once, in its own order. Each
    sample is computed independently, in constant time and memory.
    """
    epochs, positions = np.divmod(samples, rows)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        found[inside] = permute_pseudorandomly(positions[inside], length=rows, key=f"{seed}:{epoch}")
    return found


def permute_pseudorandomly(positions: NDArray[np.int64], *, length: int, key: str) -> NDArray[np.int64]:
    """Applies the pseudorandom permutation of range(length) that `key` determines to `positions`.

    Each round is a bijection of the b-bit numbers, where 2^b >= length > 2^(b-1): an odd multiple plus a
    constant mod 2^b, then the upper half xored onto the lower. A result of `length` or more is mapped again
    until it is below (cycle walking, fewer than two times on average), so the result is a bijection of
    range(length). Black, Rogaway: Ciphers with Arbitrary Finite Domains (CT-RSA 2002).
    """
    bits = (length - 1).bit_length()
    digest = hashlib.blake2b(key.encode(), digest_size=16 * _ROUNDS).digest()
    constants = np.frombuffer(digest, dtype="<u8").reshape(_ROUNDS, 2).astype(np.uint64)

    found = positions.astype(np.uint64)
    outside = np.ones(found.shape, dtype=np.bool_)
    while outside.any():
        found[outside] = _mix_bits(found[outside], bits=bits, constants=constants)
        outside = found >= length
    return found.astype(np.int64)


def _mix_bits(numbers: NDArray[np.uint64], *, bits: int, constants: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64(2**bits - 1)
    half = np.uint64((bits + 1) // 2)
    for factor, addend in constants:
        numbers = (numbers * (factor | np.uint64(1)) + addend) & mask
        numbers = numbers ^ (numbers >> half)
    return numbers
