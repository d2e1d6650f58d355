"""Rows of tokens are read unchanged, without padding; tokens outside of the vocabulary are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.data.build import build_packed_data
from fullshard.data.row_fields import (
    UntokenizableRecordError,
    check_exclusions_are_used,
    is_message_trained,
    read_token_row,
)
from fullshard.errors import DataError
from tests.data.samples import run_of, save_tokenizer, write_rows
from tests.data.test_corpus import documents, store_of

KINDS = ("jsonl", "parquet", "datasets")
ROWS: list[list[int]] = [[i, 70_000 + i, *range(i)] for i in range(25)]


def read(row: dict[str, Any], size: int = 100) -> tuple[list[int], list[bool]]:
    tokens, trained, _ = read_token_row(row, row["input_ids"], tokens_field="input_ids", vocabulary_size=size)
    return tokens.tolist(), trained.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_its_tokens_unchanged(tmp_path: Path, kind: str):
    settings = write_rows(kind, tmp_path, [{"data": {"ids": row}, "more": "x"} for row in ROWS])
    store = store_of(tmp_path, **settings, records="tokens", tokens_field="data.ids")
    assert documents(store) == ROWS
    assert (store.vocabulary_size, store.loss_mask) == (70_025, None)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_masks_select_trained_tokens_and_padding_is_left_out(tmp_path: Path, kind: str):
    rows = [
        {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [8, 9], "labels": [8, 9], "attention_mask": [1, 1]},
        {"input_ids": [1, 2]},
    ]
    store = store_of(tmp_path, **write_rows(kind, tmp_path, rows), records="tokens")
    assert store.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert store.loss_mask.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_a_loss_mask_of_any_type_is_read():
    for mask in ([0, 1, 1], [False, True, True], [0.0, 1.0, 1.0], np.array([0, 1, 1], np.uint8)):
        assert read({"input_ids": [3, 4, 5], "loss_mask": mask}) == ([3, 4, 5], [False, True, True])


def test_lists_with_nulls_do_not_change_other_rows(tmp_path: Path):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, None]}, {"input_ids": None}, {"input_ids": [2**60]}]
    settings = {**write_rows("parquet", tmp_path, rows), "records": "tokens", "on_error": "skip"}
    with pytest.raises(DataError, match="row 1(?s:.)*with other values"):
        store_of(tmp_path, **{**settings, "on_error": "stop"})
    store = store_of(tmp_path, **settings)
    assert (documents(store), store.notes.skipped) == ([[1, 2]], 3)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": None}, "null"),
        ({"input_ids": "1 2"}, "not a list of numbers but str"),
        ({"input_ids": [1.0, 2.0]}, "float64, not integers"),
        ({"input_ids": [1, None]}, "with other values"),
        ({"input_ids": [[1], [2]]}, r"of shape \[2, 1\]"),
        ({"input_ids": [[1], [2, 3]]}, "not a list of numbers"),
        ({"input_ids": [1, 100]}, "token 100; the vocabulary has 100"),
        ({"input_ids": [1, -1]}, "token -1"),
        ({"input_ids": [1, 2**70]}, "with other values"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "'labels' has 2 at position 0, where 1 is the token"),
        ({"input_ids": [1, 2], "loss_mask": [0.5, 1]}, "other values than 0 and 1, such as 0.5"),
        ({"input_ids": [1, 2], "loss_mask": [2, 1]}, "other values than 0 and 1, such as 2"),
        ({"input_ids": [1, 2], "position_ids": [3, 4]}, "'position_ids' does not count from 0"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "other values than 0 and 1, such as 2"),
        ({"input_ids": [1, 2], "segment_ids": [1, 2]}, "'segment_ids' is .* position_ids, which begin at 0"),
        ({"input_ids": [1, 2], "cu_seqlens": [0, 1, 2]}, "'cu_seqlens' is"),
        ({"input_ids": [1, 2], "special_tokens_mask": [0, 1]}, "'special_tokens_mask' is"),
        ({"input_ids": [1, 2], "weight": 0}, "'weight' is 0"),
    ],
)
def test_invalid_token_rows_are_refused_with_the_reason(row: dict[str, Any], why: str):
    with pytest.raises(UntokenizableRecordError, match=why):
        read(row)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_tokenizer_does_not_have_are_reported_with_their_row(tmp_path: Path, kind: str):
    settings = {**write_rows(kind, tmp_path, [{"input_ids": [1]}, {"input_ids": [300]}]), "records": "tokens"}
    settings["tokenizer"] = save_tokenizer(tmp_path / "tok")
    with pytest.raises(DataError, match=r"(?s)(line 2|row 1)\.\n.*token 300; the vocabulary has 289"):
        store_of(tmp_path, **settings)
    store = store_of(tmp_path, **settings, on_error="skip")
    assert (documents(store), store.notes.skipped) == ([[1]], 1)


def test_token_rows_do_not_mix_with_text_that_has_no_tokenizer(tmp_path: Path):
    tokens = {**write_rows("jsonl", tmp_path / "a", [{"input_ids": ROWS[20]}] * 4), "records": "tokens"}
    texts = write_rows("jsonl", tmp_path / "b", [{"text": "the cat sat on a mat"}] * 9)
    assert build_packed_data(run_of(tmp_path, **tokens, validation_fraction=0)).tokenizer is None
    with pytest.raises(DataError, match="do not mix"):
        build_packed_data(run_of(tmp_path, sources=[tokens, texts]))
    tokenizer = save_tokenizer(tmp_path / "tok")
    small = {**write_rows("jsonl", tmp_path / "c", [{"input_ids": [*range(40)]}] * 4), "records": "tokens"}
    mixed = build_packed_data(
        run_of(tmp_path, sources=[small, texts], tokenizer=tokenizer, validation_fraction=0)
    )
    assert mixed.vocabulary == 289


def test_data_without_a_trained_token_is_refused(tmp_path: Path):
    rows = [{"input_ids": [1, 2], "labels": [-100, -100]}]
    with pytest.raises(DataError, match=r"no token of rows\.jsonl is trained on"):
        store_of(tmp_path, **write_rows("jsonl", tmp_path, rows), records="tokens")


PACKED = [5, 6, 7, 8, 9, 10]


def test_documents_of_a_packed_row_are_split_without_its_padding():
    row = {"position_ids": [0, 0, 1, 0, 1, 0], "attention_mask": [0, 1, 1, 1, 1, 0]}
    tokens, _, ends = read_token_row(row, PACKED, tokens_field="ids", vocabulary_size=100)
    assert (tokens.tolist(), ends) == ([6, 7, 8, 9], [2, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_of_every_source_are_several_documents(tmp_path: Path, kind: str):
    rows = [
        {"data": {"ids": PACKED, "position_ids": [0, 1, 2, 3, 0, 1], "completion_mask": [0, 1, 1, 1, 0, 1]}}
    ]
    store = store_of(tmp_path, **write_rows(kind, tmp_path, rows), records="tokens", tokens_field="data.ids")
    assert documents(store) == [PACKED[:4], PACKED[4:]]
    assert store.loss_mask.tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"weight": 0.5},
        {"train": False},
        {"loss": False},
        {"masked": True},
        {"mask": [1, 1]},
        {"mask": "User"},
        {"labels": [1, -100]},
        {"loss_mask": [0, 1]},
        {"attention_mask": [1, 0]},
        {"special_tokens_mask": [1, 0]},
        {"position_ids": [0, 1, 0]},
        {"cu_seqlens": [0, 1, 3]},
        {"segment_ids": [1, 2]},
    ],
)
def test_a_mark_that_is_not_used_refuses_its_row(mark: dict[str, Any]):
    (name,) = mark
    with pytest.raises(UntokenizableRecordError, match=rf"^'{name}' is"):
        check_exclusions_are_used({"text": "a", **mark}, "text")
    with pytest.raises(UntokenizableRecordError, match=rf"^'(data\.)?{name}' is"):
        check_exclusions_are_used({"data": {"text": "a", **mark}}, "data.text")


@pytest.mark.parametrize(
    "row",
    [
        {"weight": 1, "train": True, "loss": 2.31, "masked": 0, "mask": None},
        {"labels": [3, 1], "label": 2, "score": 0.0, "url": "a", "meta": {"weight": 0}, "split": "train"},
        {"labels": 3, "segment_ids": "a-b", "document_ids": 7, "train": "yes", "labels_mask": [[1], [2, 3]]},
        {"attention_mask": [1, 1], "position_ids": [0, 1], "segment_ids": [4, 4], "seq_lengths": [2]},
    ],
)
def test_fields_that_exclude_nothing_are_ignored(row: dict[str, Any]):
    check_exclusions_are_used({"text": "a", **row}, "text")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_every_source_refuses_or_leaves_out_a_row_of_weight_zero(tmp_path: Path, kind: str):
    settings = write_rows(kind, tmp_path, [{"text": "a", "weight": 1.0}, {"text": "b", "weight": 0.0}])
    with pytest.raises(DataError, match=r"'weight' is 0\.0"):
        store_of(tmp_path, **settings)
    assert store_of(tmp_path, **settings, on_error="skip").notes.skipped == 1


def test_flags_of_messages_exclude_them_and_weights_between_are_refused():
    for excluded in ({"weight": 0}, {"train": False}, {"training": False}, {"masked": True}, {"loss": 0}):
        assert not is_message_trained(excluded, "message 1")
    assert is_message_trained(
        {"weight": 1.0, "train": True, "masked": False, "id": 0, "score": 0}, "message 1"
    )
    for refused in ({"weight": 0.5}, {"train": "no"}, {"mask": 0}, {"train_detail": [{"train": False}]}):
        with pytest.raises(UntokenizableRecordError, match="of message 1"):
            is_message_trained(refused, "message 1")
