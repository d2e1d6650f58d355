"""Evaluation of a model: the validation loss, and generated text."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.agreement import world_size
from fullshard.models.loss import Loss, sum_and_count
from fullshard.parallel.fp8 import reuse_weight_scales
from fullshard.training.between_steps import evaluation_mode
from fullshard.training.step import move_batch_to_device

_TEMPERATURE = 0.7


@torch.no_grad()
def validation_loss(model: nn.Module, microbatches: Iterable[Any], *, loss: Loss) -> float:
    """Returns the mean loss over the microbatches of all ranks, equal on every rank. Collective.

    It is NaN if nothing counts. Raises TrainError as a step does for what is not a loss.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluation_mode(model), reuse_weight_scales(model):
        for batch in microbatches:
            total, count = sum_and_count(loss(model, move_batch_to_device(batch, device)))
            sums[0] += total
            sums[1] += count
    if world_size() > 1:
        dist.all_reduce(sums)
    total_loss, total_count = cast(list[float], sums.tolist())
    return total_loss / total_count if total_count else math.nan


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], *, tokens: int, window: int, multiple: int = 1
) -> list[int]:
    """Returns the token ids of `prompt`, followed by generated ones, which rank 0 samples. Collective.

    tokens: number of tokens to generate, each with a forward pass over the whole window
    window: number of most recent tokens that the model sees
    multiple: the model gets a multiple of this many tokens, the last of which it ignores
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    text = list(prompt)
    with evaluation_mode(model):
        for _ in range(tokens):
            seen = text[-window:]
            unread = [0] * (-len(seen) % multiple)
            output = model(torch.tensor([seen + unread], device=device))  # (1, up to window)
            logits: Tensor = getattr(output, "logits", output)[0, len(seen) - 1].float().cpu()
            chosen = torch.multinomial((logits / _TEMPERATURE).softmax(-1), 1, generator=generator)
            chosen = chosen.to(device)
            if world_size() > 1:
                dist.broadcast(chosen, src=0)
            text.append(int(chosen.item()))
    return text
