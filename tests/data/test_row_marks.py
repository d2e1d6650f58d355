"""Marks that exclude or separate are used, or the row is refused; other fields are ignored."""

from pathlib import Path
from typing import Any

import pytest

from fullshard.data.row_fields import UntokenizableRecordError
from fullshard.data.token_rows import check_unused_marks, is_message_trained
from fullshard.errors import DataError
from tests.data.samples import write_rows
from tests.data.test_corpus import store_of


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
        check_unused_marks({"text": "a", **mark}, "text")
    with pytest.raises(UntokenizableRecordError, match=rf"^'(data\.)?{name}' is"):
        check_unused_marks({"data": {"text": "a", **mark}}, "data.text")


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
    check_unused_marks({"text": "a", **row}, "text")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_every_source_refuses_or_leaves_out_a_row_of_weight_zero(tmp_path: Path, kind: str):
    settings = write_rows(kind, tmp_path, [{"text": "a", "weight": 1.0}, {"text": "b", "weight": 0.0}])
    with pytest.raises(DataError, match=r"'weight' is 0\.0"):
        store_of(tmp_path, **settings)
    assert store_of(tmp_path, **settings, on_error="skip").skipped == 1


def test_flags_of_messages_exclude_them_and_weights_between_are_refused():
    for excluded in ({"weight": 0}, {"train": False}, {"training": False}, {"masked": True}, {"loss": 0}):
        assert not is_message_trained(excluded, "message 1")
    assert is_message_trained(
        {"weight": 1.0, "train": True, "masked": False, "id": 0, "score": 0}, "message 1"
    )
    for refused in ({"weight": 0.5}, {"train": "no"}, {"mask": 0}, {"train_detail": [{"train": False}]}):
        with pytest.raises(UntokenizableRecordError, match="of message 1"):
            is_message_trained(refused, "message 1")
