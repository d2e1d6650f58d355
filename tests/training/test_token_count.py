"""Tokens of a microbatch are counted as the plan counts them, whatever the batch and its labels are."""

from typing import Any

import pytest
import torch

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.step import count_computed_tokens

ROWS, LENGTH = 4, 16
IDS = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
IMAGES, CLASSES = torch.zeros(ROWS, 3, 8, 8), torch.zeros(ROWS, dtype=torch.int64)


def count(batch: Any, *, length: int = LENGTH) -> int:
    settings = [f"data.sequence_length={length}", f"train.microbatch={ROWS}", f"train.global_batch={ROWS}"]
    return count_computed_tokens(batch, Plan.from_run(Run.load(overrides=settings), world_size=1))


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": torch.full_like(IDS, -100), "tokens": IDS},
        {"labels": IDS[:, :3], "decoder_input_ids": IDS[:, :3], "input_ids": IDS},
        {"tokens": IDS.view(1, -1), "labels": IDS.view(1, -1)},
        {"pixel_values": torch.zeros(99, 12), "labels": CLASSES},
        {"x": IMAGES, "y": CLASSES},
        (IDS, IDS),
        (IMAGES, CLASSES),
        ["a text", "another"],
    ],
)
def test_a_microbatch_of_the_plans_size_counts_as_in_the_plan(batch: Any):
    assert count(batch) == ROWS * LENGTH


@pytest.mark.parametrize(
    "batch", [{"input_ids": IDS, "pixel_values": IMAGES}, (IMAGES, CLASSES), (IDS, CLASSES)]
)
def test_samples_that_are_no_sequences_count_as_one_each(batch: Any):
    assert count(batch, length=1) == ROWS


def test_other_rows_and_lengths_count_as_they_are():
    assert count({"tokens": IDS[:3, :5]}) == count({"input_ids": IDS[:3, :5]}) == count((IDS[:3, :5],)) == 15
    assert count({"x": IMAGES[:3]}) == 3 * LENGTH
