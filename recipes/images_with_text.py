"""Batches of images with text for recipes/vision-language.toml. Replace `row` by one that reads your data."""

from collections.abc import Iterator

import torch
from torch import Tensor

import fullshard as fs

IMAGE_TOKEN, PATCHES, PIXELS = 32000, 576, 336  # an image of 336 × 336 is 24 × 24 patches of 14 × 14


class ImagesWithText:
    """One image before each text. A sample depends on its number alone, so that a run can resume."""

    def __init__(self, run: fs.Run) -> None:
        self._length = run.data.sequence_length

    def microbatches(self, step: int, *, rank: int, plan: fs.Plan) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's part of the step's batch: the arguments of the model's `forward`."""
        for turn in range(plan.accumulation):
            first = ((step * plan.accumulation + turn) * plan.data_parallel_degree + rank) * plan.microbatch
            rows = [self.row(first + index) for index in range(plan.microbatch)]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def row(self, index: int) -> dict[str, Tensor]:
        """Returns a sample: the tokens, the image, and labels that are -100 where nothing is learnt."""
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(3, IMAGE_TOKEN, (self._length - PATCHES,), generator=generator)
        tokens = torch.cat([torch.full((PATCHES,), IMAGE_TOKEN), text])
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "pixel_values": torch.rand(3, PIXELS, PIXELS, generator=generator),
            "labels": tokens.where(tokens != IMAGE_TOKEN, -100),
        }
