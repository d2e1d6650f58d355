"""Documents into rows of one length: which pieces of the stream stand in which row.

[Note: what is held out]
Documents are gone through in a pseudorandom order that follows from their number alone, and held out whole
until the fraction of all tokens is reached. Where they are few and large, so that less than half of the
fraction is filled, the rest of it is the tail of the largest document.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fullshard.data.order import permute
from fullshard.data.token_store import Integers, mapped_npy

Packing = Literal["concat", "best_fit", "none"]
Int64 = NDArray[np.int64]

NO_LABEL = -1
"""Where a label would stand that there is not."""


@dataclass(frozen=True)
class Spans:
    """Parts of the stream: `begins`, `lengths`, and whether the document `ends` with its part."""

    begins: Int64
    lengths: Int64
    ends: NDArray[np.bool_]

    def select(self, which: Integers) -> "Spans":
        return Spans(self.begins[which], self.lengths[which], self.ends[which])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Rows(Protocol):
    """A part of the data in rows of `sequence_length`."""

    @property
    def count(self) -> int: ...

    @property
    def tokens(self) -> int:
        """In all rows; the rest of them is padding."""
        ...

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(begin, length, where the label of its last token stands, or NOTHING) of each piece, in order."""
        ...


def split_spans(begins: Int64, lengths: Int64, *, fraction: float) -> tuple[Spans, Spans]:
    """(training, held out), with about `fraction` of the tokens held out. See [Note: what is held out]."""
    everything = Spans(begins, lengths, np.ones(len(begins), dtype=np.bool_))
    budget = round(fraction * int(lengths.sum()))
    order = permute(np.arange(len(lengths)), length=len(lengths), key="hold out")
    out = np.zeros(len(lengths), dtype=np.bool_)
    out[order[np.cumsum(lengths[order]) <= budget]] = True
    left = budget - int(lengths[out].sum())
    training, held_out = everything.select(~out), everything.select(out)
    if 2 * left <= budget or not training.tokens:
        return training, held_out
    # It did not fit, or what did would not fill half: the largest is cut, and both parts hold something.
    largest = int(np.argmax(training.lengths))
    left = min(left, int(training.lengths[largest]) - 1)
    if left < 1:
        return training, held_out
    tail = training.begins[largest] + training.lengths[largest] - left
    training.lengths[largest] -= left
    return training, Spans(
        np.append(held_out.begins, tail), np.append(held_out.lengths, left), np.append(held_out.ends, True)
    )


def shuffled(spans: Spans, *, seed: int) -> Spans:
    """In an order that follows from the seed."""
    count = len(spans.begins)
    if not count:
        return spans
    return spans.select(permute(np.arange(count), length=count, key=f"shuffle {seed}"))


@dataclass(frozen=True)
class JoinedRows:
    """`concat`: documents joined, and cut into windows of S + 1, S apart: a row and the label of its last.
    A tail shorter than a window is dropped. `offsets[i]` is where span i begins in what is joined."""

    begins: Integers
    offsets: Integers
    sequence_length: int
    masked: bool

    @property
    def count(self) -> int:
        return max(int(self.offsets[-1]) - 1, 0) // self.sequence_length

    @property
    def tokens(self) -> int:
        return self.count * self.sequence_length

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Where `masked`, no piece's last token has the next document's first for its label."""
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
class FilledRows:
    """`best_fit` and `none`: row i holds pieces[offsets[i]:offsets[i + 1]]. No piece has the next one's first
    token for a label; one that its document goes on behind has the token that follows."""

    begins: Integers
    lengths: Integers
    open: Integers
    offsets: Integers
    tokens: int

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """See `Rows`."""
        for i in range(int(self.offsets[row]), int(self.offsets[row + 1])):
            begin, length = int(self.begins[i]), int(self.lengths[i])
            yield begin, length, begin + length if self.open[i] else NO_LABEL


def write_rows(spans: Spans, draft: Path, *, part: str, packing: Packing, sequence_length: int) -> int:
    """The rows of `spans` as files in `draft` that begin with `part`. Returns the tokens that stand in them
    (before `concat` drops the tail)."""
    if packing == "concat":
        offsets = np.concatenate([[0], np.cumsum(spans.lengths)]).astype(np.int64)
        arrays: Mapping[str, Any] = {"begins": spans.begins, "offsets": offsets}
    else:
        spans = pieces = split_long(spans, sequence_length)
        order, offsets = (best_fit if packing == "best_fit" else one_per_row)(pieces.lengths, sequence_length)
        pieces = pieces.select(order)
        arrays = {
            "begins": pieces.begins,
            "lengths": pieces.lengths.astype(np.int32),
            "open": ~pieces.ends,
            "offsets": offsets,
        }
    for name, array in arrays.items():
        np.save(draft / f"{part}-{name}.npy", array)
    return spans.tokens


def open_rows(
    entry: Path, *, part: str, packing: Packing, sequence_length: int, masked: bool, tokens: int
) -> Rows:
    """What `write_rows` wrote, mapped."""

    def array(name: str) -> Integers:
        return mapped_npy(entry / f"{part}-{name}.npy")

    if packing == "concat":
        return JoinedRows(array("begins"), array("offsets"), sequence_length, masked)
    return FilledRows(array("begins"), array("lengths"), array("open"), array("offsets"), tokens)


def split_long(spans: Spans, length: int) -> Spans:
    """Each span in pieces of `length`, and a rest. A rest that is a document's last token alone is left out:
    nothing follows it, and as a label it stands with the piece before."""
    counts = -(-spans.lengths // length)
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(first, counts)  # the piece's number in its span
    lengths = np.minimum(np.repeat(spans.lengths, counts) - within * length, length)
    ends = (within == np.repeat(counts, counts) - 1) & np.repeat(spans.ends, counts)
    pieces = Spans(np.repeat(spans.begins, counts) + within * length, lengths, ends)
    return pieces.select((lengths > 1) | ~ends)


def one_per_row(lengths: Int64, _capacity: int) -> tuple[Int64, Int64]:
    """A row for each piece: as `best_fit`."""
    return np.arange(len(lengths)), np.arange(len(lengths) + 1)


def best_fit(lengths: Int64, capacity: int) -> tuple[Int64, Int64]:
    """Best-fit-decreasing: the longest piece first, each into the fullest row that still has room for it.

    Returns (the pieces in the order of rows, where each row begins in it). Pieces of one length go as one:
    a row with room r takes r // length of them, one after the other, as it would one by one. So it is
    O(n log n) in numpy and O(lengths × rooms) in Python. Of many pieces it needs at most 11/9 of the fewest
    rows there can be (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows, room, rooms = 0, dict[int, list[Int64]](), list[int]()  # room -> the rows that have it
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
                _give(room, rooms, space=space, rows=found[used:])
            taken = min(left, used * each)
            at = begin + count - left
            row_of[at : at + taken] = np.repeat(found[:used], each)[:taken]
            left -= taken
            full = used if taken == used * each else used - 1
            _give(room, rooms, space=space - each * length, rows=found[:full])
            rest = taken - full * each
            _give(room, rooms, space=space - rest * length, rows=found[full:used])
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return order[by_row], offsets.astype(np.int64)


def _give(room: dict[int, list[Int64]], rooms: list[int], *, space: int, rows: Int64) -> None:
    if not space or not len(rows):
        return
    if space not in room:
        room[space] = []
        insort(rooms, space)
    room[space].append(rows)
