"""A vocabulary that is divided over ranks: whose tokens are where, and the log-softmax of a rank's logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.distributed.sequence_parts import gather_sequence, reduce_over_ranks


@dataclass(frozen=True)
class VocabularyPart:
    """The consecutive tokens of a vocabulary whose rows of an embedding or head one of `ranks` ranks has.

    size: tokens of the whole vocabulary; parts are equal, except that the last may be smaller
    group: name of the process group of the ranks that share it
    """

    size: int
    ranks: int
    rank: int
    group: str

    @property
    def largest(self) -> int:
        """Number of tokens of the first part, which no part exceeds."""
        return -(-self.size // self.ranks)

    @property
    def first(self) -> int:
        """This rank's first token."""
        return self.rank * self.largest

    @property
    def tokens(self) -> range:
        """This rank's tokens."""
        return range(self.first, min(self.first + self.largest, self.size))

    def local_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of `tokens` in this rank's part (0 if not in it), and which are in it."""
        rows = tokens - self.first
        own = (rows >= 0) & (rows < len(self.tokens))
        return torch.where(own, rows, 0), own

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits (..., sequence, vocabulary) of all parts. Each rank uses all of them alike."""
        return _GatherLogits.apply(logits, self)  # pyright: ignore[reportReturnType]

    def log_softmax(self, logits: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of the log-softmax over the whole vocabulary. No gradient. Collective.

        logits: this rank's (rows, part of the vocabulary)
        """
        logits = logits.detach().to(dtype)
        greatest = reduce_over_ranks(logits.amax(-1), True, self.group)
        shifted = logits - greatest.unsqueeze(-1)
        sums = reduce_over_ranks(shifted.exp().sum(-1), False, self.group)
        return shifted.sub_(sums.log_().unsqueeze(-1))

    def sum_over_parts(self, tensor: Tensor) -> Tensor:
        """Returns the sum of `tensor` over the ranks that share the vocabulary. Collective."""
        return reduce_over_ranks(tensor, False, self.group)


class _GatherLogits(torch.autograd.Function):
    """All-gather of logits whose gradient is the same on all ranks, of which each takes its part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart) -> Tensor:
        ctx.part, ctx.count = part, logits.shape[-1]
        padded = F.pad(logits, (0, part.largest - logits.shape[-1]))
        whole = gather_sequence(padded.transpose(-1, -2), part.ranks, 1, part.group)
        return whole.transpose(-1, -2)[..., : part.size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.narrow(-1, ctx.part.first, ctx.count), None
