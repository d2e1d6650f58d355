"""Batches of images with text for recipes/vision-language.toml. Replace `row` by one that reads your data."""

from collections.abc import Iterator

import torch
from torch import Tensor

import fullshard as fs

IMAGE_TOKEN, PATCHES, PIXELS = 257152, 256, 224  # an image of 224 × 224 is 16 × 16 patches of 14 × 14


class ImagesWithText:
    """One image, a question and an answer. A sample depends on its number alone, so that a run can resume."""

    def __init__(self, run: fs.Run) -> None:
        self._length = run.data.sequence_length

    def microbatches(self, step: int, *, rank: int, plan: fs.Plan) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's part of the step's batch: the arguments of the model's `forward`."""
        for turn in range(plan.accumulation):
            first = ((step * plan.accumulation + turn) * plan.data_parallel_degree + rank) * plan.microbatch
            rows = [self.row(first + index) for index in range(plan.microbatch)]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def row(self, index: int) -> dict[str, Tensor]:
        """Returns a sample. Labels are -100 where nothing is learnt: the image and the question."""
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(3, IMAGE_TOKEN, (self._length - PATCHES,), generator=generator)
        tokens = torch.cat([torch.full((PATCHES,), IMAGE_TOKEN), text])
        is_answer = torch.arange(self._length) >= PATCHES + len(text) // 2
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "token_type_ids": is_answer.long(),  # PaliGemma attends to image and question in both directions
            "pixel_values": torch.rand(3, PIXELS, PIXELS, generator=generator),
            "labels": tokens.where(is_answer, -100),
        }
