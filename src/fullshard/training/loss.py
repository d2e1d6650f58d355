"""What a loss is here, and the one that decoders train on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import TrainError

# (model, microbatch) -> the sum of losses and the number of things that it sums, or a mean alone, which then
# counts as one thing: means of microbatches of different length are weighted alike.
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | int]]

IGNORED_LABEL = -100


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in nats, and the number of labels it sums over.

    batch["tokens"], batch["labels"]: (microbatch, sequence) int64; a label of -100 does not count.
    The model gives logits (microbatch, sequence, vocabulary), or something whose `logits` are that.
    Raises TrainError for a batch without both.
    """
    try:
        tokens, labels = batch["tokens"], batch["labels"]
    except (KeyError, TypeError, IndexError):
        raise TrainError(
            "the default loss needs a batch with tokens and labels.",
            got=_described(batch),
            fix="fullshard.train(state, plan, loss=my_loss), with my_loss(model, batch)",
        ) from None
    output = model(tokens)
    logits: Tensor = getattr(output, "logits", output)
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (labels != IGNORED_LABEL).sum()


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} of {', '.join(map(str, batch))}"
    return type(batch).__name__
