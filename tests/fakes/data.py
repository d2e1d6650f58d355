"""Batches that depend on the step and the row alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fullshard.spec.plan import Plan
from fullshard.spec.settings.data_section import IGNORED_LABEL


def global_batch(step: int, *, sequences: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """A batch that no rank count changes. Rows differ in the number of labels: means of means are wrong."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(sequences):
        labels[row, : (row * 3) % length] = IGNORED_LABEL
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


class Rows:
    """`global_batch` cut into ranks' microbatches, rank by rank."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        run = plan.run
        batch = global_batch(
            step,
            sequences=run.train.global_batch,
            length=run.data.sequence_length,
            vocabulary=self.vocabulary,
        )
        for i in range(plan.accumulation):
            start = (i * plan.data_parallel_degree + rank) * plan.microbatch
            yield {name: tensor[start : start + plan.microbatch] for name, tensor in batch.items()}
