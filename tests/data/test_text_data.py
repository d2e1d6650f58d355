"""TextData: the ranks together see exactly the global batch, once, whatever their number."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data import IGNORED_LABEL, Batches, TextData, build_data
from fullshard.errors import DataError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

S = 5
laws = settings(max_examples=50)
worlds = st.integers(1, 7)
microbatches = st.integers(1, 4)
Rows = list[tuple[list[int], list[int]]]


def text_data(*, training: int = 251, held_out: int = 0, seed: int = 0) -> TextData:
    """Every byte of a part is another, as far as bytes go, so that windows can be told apart."""
    return TextData(
        source="text",
        documents=1,
        sequence_length=S,
        seed=seed,
        training=np.arange(training).astype(np.uint8),
        held_out=np.arange(held_out).astype(np.uint8),
    )


def plan_of(world: int, microbatch: int, accumulation: int = 1, **train: int) -> Plan:
    batch = world * microbatch * accumulation
    train = {"global_batch": batch, "microbatch": microbatch, **train}
    return Plan.from_run(Run.parse({"train": train}, source="test"), world_size=world)


def rows_of(batches: list[dict[str, torch.Tensor]]) -> Rows:
    return [
        (tokens.tolist(), labels.tolist())
        for batch in batches
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]


def global_batch(data: TextData, step: int, plan: Plan) -> Rows:
    return sorted(
        row
        for rank in range(plan.world_size)
        for row in rows_of(list(data.microbatches(step, rank=rank, plan=plan)))
    )


def settings_of(text: str, **data: object) -> Run:
    section = {"source": "text", "paths": (text,), "sequence_length": 8, **data}
    return Run.parse({"data": section}, source="test")


@laws
@given(worlds, microbatches, st.integers(1, 4), st.integers(0, 1000))
def test_ranks_together_see_what_one_rank_alone_sees(
    world: int, microbatch: int, accumulation: int, step: int
):
    plan = plan_of(world, microbatch, accumulation)
    alone = plan_of(1, world * microbatch * accumulation)
    assert global_batch(text_data(), step, plan) == global_batch(text_data(), step, alone)


@laws
@given(worlds, microbatches, st.integers(1, 3), st.integers(0, 50))
def test_an_epoch_has_every_byte_but_the_first_as_a_label_once(
    world: int, microbatch: int, accumulation: int, seed: int
):
    plan = plan_of(world, microbatch, accumulation)
    steps = 3
    windows = plan.run.train.global_batch * steps
    data = text_data(training=windows * S + 1 + S // 2, seed=seed)
    rows = [row for step in range(steps) for row in global_batch(data, step, plan)]
    labels = [label for _, labels in rows for label in labels]
    assert sorted(labels) == sorted(i % 256 for i in range(1, windows * S + 1))
    assert all([(token + 1) % 256 for token in tokens] == labels for tokens, labels in rows)
    assert data.train_tokens == windows * S


divisors_of_12 = st.sampled_from([1, 2, 3, 4, 6, 12])


@laws
@given(st.lists(st.tuples(divisors_of_12, st.integers(1, 5)), min_size=1, max_size=5))
def test_parts_on_any_ranks_lose_no_sample_and_double_none(parts: list[tuple[int, int]]):
    """Each part: so many ranks for so many steps; it begins, with data of its own, where the last ended."""
    total = sum(steps for _, steps in parts)
    alone = plan_of(1, 12)
    whole = [global_batch(text_data(), step, alone) for step in range(total)]
    seen, step = [], 0
    for world, steps in parts:
        data, plan = text_data(), plan_of(world, 12 // world)
        seen += [global_batch(data, step + i, plan) for i in range(steps)]
        step += steps
    assert seen == whole


def test_a_step_does_not_depend_on_the_steps_before_it():
    plan, data = plan_of(2, 3, 2), text_data()
    in_order = [global_batch(data, step, plan) for step in range(20)]
    assert [global_batch(text_data(), step, plan) for step in (19, 4, 7)] == [in_order[i] for i in (19, 4, 7)]


def test_microbatches_are_int64_of_the_planned_shape():
    data: Batches = text_data()
    batches = list(data.microbatches(3, rank=1, plan=plan_of(2, 3, 4)))
    assert len(batches) == 4
    for batch in batches:
        assert set(batch) == {"tokens", "labels"}
        assert all(t.shape == (3, S) and t.dtype == torch.int64 and t.is_contiguous() for t in batch.values())


@laws
@given(worlds, microbatches, st.integers(1, 40), st.integers(0, 200))
def test_validation_is_the_same_sequences_on_any_ranks(
    world: int, microbatch: int, asked: int, held_out: int
):
    data = text_data(held_out=held_out)
    plan = plan_of(world, microbatch, validate_sequences=asked)
    alone = plan_of(1, 1, validate_sequences=asked)
    shares = [list(data.validation(rank=rank, plan=plan)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert all(batch["tokens"].shape == (microbatch, S) for share in shares for batch in share)
    rows = [row for share in shares for row in rows_of(share)]
    real = sorted(row for row in rows if row[1] != [IGNORED_LABEL] * S)
    assert all(IGNORED_LABEL not in labels for _, labels in real)
    assert real == sorted(rows_of(list(data.validation(rank=0, plan=alone))))
    assert len({tuple(labels) for _, labels in real}) == min(asked, max(held_out - 1, 0) // S)


def test_validation_is_spread_over_what_is_held_out():
    data = text_data(held_out=10 * S + 1)
    rows = rows_of(list(data.validation(rank=0, plan=plan_of(1, 1, validate_sequences=3))))
    assert [tokens[0] // S for tokens, _ in rows] == [0, 3, 6]


def test_no_document_is_on_both_sides(tmp_path: Path):
    for letter in range(ord("A"), ord("A") + 40):
        (tmp_path / chr(letter)).write_bytes(bytes([letter]) * 20)
    data = build_data(settings_of(f"{tmp_path}/*", validation_fraction=0.25))
    training, held_out = set(data.training.tolist()), set(data.held_out.tolist())
    assert (len(training), len(held_out)) == (30 + 1, 10 + 1)
    assert training & held_out == {0}
    assert data.documents == 40


def test_data_does_not_depend_on_where_it_lies(tmp_path: Path):
    for place in ("here", "there/below"):
        (tmp_path / place).mkdir(parents=True)
        for i in range(30):
            (tmp_path / place / f"{i}.txt").write_text(f"document {i}" * 5)
    here, there = (
        build_data(settings_of(f"{tmp_path}/{place}/*.txt", validation_fraction=0.2))
        for place in ("here", "there/below")
    )
    assert np.array_equal(here.training, there.training)
    assert np.array_equal(here.held_out, there.held_out)


def test_nothing_is_held_out_at_fraction_zero(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a" * 100)
    data = build_data(settings_of(f"{tmp_path}/a.txt", validation_fraction=0))
    assert data.validation_tokens == 0
    assert list(data.validation(rank=0, plan=plan_of(2, 2))) == []
    assert "none held out" in data.describe()


def test_entropy_of_even_bytes_is_the_logarithm_of_their_number():
    assert text_data(training=128).byte_entropy == pytest.approx(np.log(128))


def test_decode_takes_any_token():
    data = text_data()
    assert data.decode(torch.tensor(list("naïve\n".encode()))) == "naïve\n"
    assert data.decode([65, 0, 66, 0xC3, 300]) == "A␀B\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_stdlib_is_enough_for_the_default_run():
    data = build_data(Run())
    assert data.train_tokens > 5_000_000
    assert 0.04 < data.validation_tokens / (data.validation_tokens + data.train_tokens) <= 0.05
    assert 2.5 < data.byte_entropy < 4
    assert "import " in data.decode(data.training[:100_000].tolist())


@pytest.mark.parametrize(
    ("size", "fraction", "message"),
    [
        (8, 0.0, r"training part(?s:.)*got: 8 bytes(?s:.)*needs 9(?s:.)*sequence_length of 7 or less"),
        (100, 0.05, r"held-out part(?s:.)*got: 5 bytes(?s:.)*larger data.validation_fraction"),
        (100, 0.002, r"held-out part(?s:.)*got: 0 bytes"),
        (100, 0.95, r"training part(?s:.)*got: 5 bytes"),
    ],
)
def test_text_too_short_for_one_sequence_is_refused(tmp_path: Path, size: int, fraction: float, message: str):
    (tmp_path / "a.txt").write_text("a" * size)
    with pytest.raises(DataError, match=f"sequence too long: the {message}"):
        build_data(settings_of(f"{tmp_path}/a.txt", validation_fraction=fraction))


def test_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(SpecError, match="vocabulary"):
        build_data(Run.parse({"model": {"vocabulary": 255}}, source="test"))
