"""PackedData: nothing lost, nothing doubled, the order exact: any ranks, packings, mixtures and resumes."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.batches import MicrobatchPrefetcher
from fullshard.data.build import build_packed_data
from fullshard.data.packed import PackedData
from fullshard.spec.settings.data_section import IGNORED_LABEL
from tests.data.samples import plan_of, run_of

S = 7
laws = settings(max_examples=15)
packings = st.sampled_from(["concat", "best_fit", "none"])
divisors_of_12 = st.sampled_from([1, 2, 3, 4, 6, 12])
Row = tuple[tuple[int, ...], ...]


@cache
def tokens_in(sizes: tuple[int, ...], first: int) -> str:
    """A file of documents of these sizes, every token another: the place in the stream and `first`; the last
    of a document is 0."""
    path = Path(mkdtemp()) / "a.npy"
    places = np.arange(sum(sizes)) + first
    places[np.cumsum(sizes) - 1] = 0
    np.save(path, places)
    return str(path)


def sizes_of(count: int, salt: int) -> tuple[int, ...]:
    return tuple(2 + (i * 7 + salt) % 11 for i in range(count))


@cache
def cache_directory() -> Path:
    return Path(mkdtemp())


@cache
def data_of(
    packing: str,
    *,
    weights: tuple[float, ...] = (),
    masked: bool = False,
    fraction: float = 0.0,
    seed: int = 0,
) -> PackedData:
    """One source of 40 documents; or one a weight, whose tokens begin at 1000, 2000, …"""
    sources = [
        {"source": "memmap", "paths": (tokens_in(sizes_of(40, i), 1000 * (i + 1)),), "eod_token": 0}
        for i in range(max(len(weights), 1))
    ]
    if weights:
        for source, weight in zip(sources, weights, strict=True):
            source["weight"] = weight
    return build_packed_data(
        run_of(
            cache_directory(),
            seed=seed,
            sources=sources,
            packing=packing,
            document_mask=masked,
            sequence_length=S,
            validation_fraction=fraction,
        )
    )


def rows_of(batch: dict[str, torch.Tensor]) -> Iterator[Row]:
    for row in zip(*(tensor.tolist() for tensor in batch.values()), strict=True):
        *rest, last = map(tuple, row)
        if "document_ends" in batch:  # padded as the longest row of the batch needs
            last = tuple(sorted(set(last)))
        yield (*rest, last)


def global_batch(data, step: int, world: int, microbatch: int, accumulation: int = 1) -> list[Row]:
    """The rows of a step as they are numbered in the stream."""
    plan = plan_of(world, microbatch, accumulation)
    shares = [list(data.microbatches(step, rank=rank, plan=plan)) for rank in range(world)]
    return [row for turn in zip(*shares, strict=True) for batch in turn for row in rows_of(batch)]


def rows_from(data: PackedData, first: int, count: int) -> list[Row]:
    return [row for step in range(first, first + count) for row in global_batch(data, step, 1, 1)]


@laws
@given(
    packings, st.tuples(divisors_of_12, divisors_of_12), st.booleans(), st.integers(0, 1000), st.booleans()
)
def test_ranks_and_microbatches_together_see_the_rows_of_one_rank(
    packing: str, both: tuple[int, int], masked: bool, step: int, mixed: bool
):
    world, microbatch = both
    if 12 % (world * microbatch):
        microbatch = 1
    data = data_of(packing, masked=masked, weights=(0.7, 0.2, 0.1) if mixed else ())
    whole = global_batch(data, step, 1, 12)
    assert global_batch(data, step, world, microbatch, 12 // (world * microbatch)) == whole
    at_row = data.microbatches_at_row(step, rank=0, plan=plan_of(1, 12))
    assert [row for batch in at_row for row in rows_of(batch)] == rows_from(data, step, 12)


@laws
@given(packings, st.integers(0, 3), st.integers(0, 50))
def test_each_token_is_seen_once_an_epoch(packing: str, epoch: int, seed: int):
    data = data_of(packing, seed=seed)
    (pool,) = data.pools
    rows = rows_from(data, epoch * pool.training.row_count, pool.training.row_count)
    documents = pool.stream.stores[0].tokens
    seen = Counter(token for tokens, _ in rows for token in tokens if token)
    if packing == "concat":  # but what the last window leaves
        assert max(seen.values()) == 1
        assert len(rows) * S > len(documents) - 1 - S
    else:
        assert seen == Counter(token for token in documents.tolist() if token)
        labels = Counter(label for _, labels in rows for label in labels)
        begins = set(documents[pool.stream.stores[0].begins].tolist())
        assert all(labels[token] == (token not in begins) for token in seen)
        assert labels[0] == 40


@laws
@given(packings, st.booleans(), st.integers(0, 300))
def test_each_label_is_the_next_token_and_none_crosses_a_mask(packing: str, masked: bool, step: int):
    crossing = packing == "concat" and not masked
    for tokens, labels, *rest in global_batch(data_of(packing, masked=masked), step, 1, 4):
        for i, (token, label) in enumerate(zip(tokens, labels, strict=True)):
            if token == 0:  # the end of a document, or padding
                assert (label % 1000 >= 0 and label != IGNORED_LABEL) if crossing else label == IGNORED_LABEL
            else:
                assert label in (token + 1, 0)
            if i + 1 < S and label != IGNORED_LABEL:
                assert tokens[i + 1] == label
        if masked:
            documents, positions, _ = rest
            begins = [i for i in range(S) if i == 0 or documents[i] != documents[i - 1]]
            assert [positions[i] for i in begins] == [0] * len(begins)
            assert all(positions[i] == positions[i - 1] + 1 for i in range(S) if i not in begins)
            assert sorted(documents) == list(documents)
            assert all(tokens[i] == 0 for i in range(S - 1) if i + 1 in begins)


@laws
@given(
    packings, st.booleans(), st.lists(st.tuples(divisors_of_12, st.integers(1, 4)), min_size=1, max_size=4)
)
def test_resuming_on_other_rank_counts_loses_and_repeats_no_sample(packing: str, mixed: bool, parts):
    """Each part has a rank count and a step count, and begins with fresh data where the part before ended."""
    weights = (0.6, 0.4) if mixed else ()
    total = sum(steps for _, steps in parts)
    whole = [global_batch(data_of(packing, weights=weights), step, 1, 12) for step in range(total)]
    seen, step = [], 0
    for world, steps in parts:
        with MicrobatchPrefetcher(data_of.__wrapped__(packing, weights=weights), steps=1) as data:
            plan = plan_of(world, 12 // world)
            for _ in range(steps):
                shares = [list(data.microbatches(step, rank=rank, plan=plan)) for rank in range(world)]
                seen.append([row for share in shares for batch in share for row in rows_of(batch)])
                step += 1
    assert seen == whole


@laws
@given(packings, st.sampled_from([(0.5, 0.5), (0.7, 0.3), (3.0, 2.0, 5.0)]), st.integers(0, 20))
def test_a_mixture_has_its_sources_in_proportion_and_each_in_whole_epochs(
    packing: str, weights: tuple[float, ...], first: int
):
    data = data_of(packing, weights=weights)
    period = len(data.pattern.sources)
    rows = rows_from(data, first * period, period)
    from_each = Counter(max(tokens) // 1000 - 1 for tokens, *_ in rows)
    assert [from_each[i] / period for i in range(len(weights))] == [w / sum(weights) for w in weights]
    count = data.pools[0].training.row_count
    own = [row for row in rows_from(data, 0, 4 * count) if max(row[0]) // 1000 == 1]
    assert len(set(own[:count])) == min(count, len(own))


@laws
@given(packings, st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_validation_is_the_same_rows_on_any_ranks(
    packing: str, world: int, microbatch: int, asked: int, mixed: bool
):
    data = data_of(packing, weights=(0.8, 0.2) if mixed else (), fraction=0.3)
    plan, alone = (
        plan_of(world, microbatch, validate_sequences=asked),
        plan_of(1, 1, validate_sequences=asked),
    )
    shares = [list(data.validation(rank=rank, plan=plan)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    real = [
        row for share in shares for batch in share for row in rows_of(batch) if set(row[1]) != {IGNORED_LABEL}
    ]
    wanted = [row for batch in data.validation(rank=0, plan=alone) for row in rows_of(batch)]
    assert sorted(real) == sorted(wanted)
    trained = {token for row in rows_from(data, 0, 200) for token in row[0] if token}
    assert not trained & {token for row in wanted for token in row[0] if token}


def test_microbatches_are_int64_of_the_planned_shape():
    for masked, names in (
        (False, {"tokens", "labels"}),
        (True, {"tokens", "labels", "documents", "positions", "document_ends"}),
    ):
        batches = list(data_of("best_fit", masked=masked).microbatches(3, rank=1, plan=plan_of(2, 3, 4)))
        assert len(batches) == 4
        for batch in batches:
            assert set(batch) == names
            batch.pop("document_ends", None)
            assert all(tensor.shape == (3, S) and tensor.dtype == torch.int64 for tensor in batch.values())


@laws
@given(packings, st.integers(0, 200), divisors_of_12)
def test_document_ends_are_the_changes_of_document(packing: str, step: int, microbatch: int):
    """They cover each row to its end, and number powers of two, so that few sizes occur."""
    (batch,) = data_of(packing, masked=True).microbatches(step, rank=0, plan=plan_of(1, microbatch))
    ends = batch["document_ends"]
    assert ends.dtype == torch.int32
    assert (len(ends), ends.shape[1].bit_count()) == (microbatch, 1)
    assert torch.equal(ends[:, -1], torch.full((microbatch,), S))
    assert torch.equal(ends, ends.sort().values)
    documents = (torch.arange(S)[None, :, None] >= ends[:, None, :]).sum(-1)
    assert torch.equal(documents, batch["documents"])


def test_seeds_and_epochs_order_rows_differently():
    data = data_of("best_fit")
    count = data.pools[0].training.row_count
    first, second = rows_from(data, 0, count), rows_from(data, count, count)
    assert sorted(first) == sorted(second)
    assert first != second != rows_from(data_of("best_fit", seed=1), 0, count)


def test_tokens_and_their_layout_stay_memory_mapped():
    pool = data_of("best_fit").pools[0]
    arrays = [pool.stream.stores[0].tokens, *(getattr(pool.training, name) for name in ("begins", "offsets"))]
    assert all(isinstance(array, np.memmap) for array in arrays)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_the_summary_describes_the_data(packing: str):
    data = data_of(packing, fraction=0.2)
    summary = data.summary_values()
    assert summary["documents"] == 40
    assert summary["vocabulary"] == data.vocabulary
    assert summary["efficiency"] == data.training_token_count / (summary["training sequences"] * S)
    assert "40 documents" in data.describe()
    assert packing in data.describe()


def test_the_row_order_identifies_everything_that_determines_it(tmp_path: Path):
    def order(*, words: str = "one two three", **settings: object) -> str:
        (tmp_path / "a.txt").write_text(f"{words} " * 40)
        paths = {"source": "text", "paths": [str(tmp_path / "a.txt")]}
        return build_packed_data(run_of(tmp_path / "cache", **(paths | settings))).row_order

    assert order() == order(processes=2, document_mask=True)
    others = [{"seed": 1}, {"sequence_length": 8}, {"packing": "best_fit"}, {"validation_fraction": 0.2}]
    others += [{"words": "one two trees"}]
    assert len({order(), *(order(**other) for other in others)}) == 1 + len(others)
