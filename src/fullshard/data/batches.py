"""Interfaces between the training loop and its data."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fullshard.spec.plan import Plan

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""


class Batches(Protocol):
    """A source of microbatches without its own position: the samples of a step depend only on the step."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields `plan.accumulation` microbatches for this rank, of step `step` (from 0).

        Each is passed to the loss as it is. For a given step, all ranks together must yield the same samples
        for any number of ranks, so that a run resumed on a different number continues exactly.
        """
        ...


class Data(Batches, Protocol):
    """The result of `build_data`: batches, held-out batches, and a description."""

    @property
    def vocabulary(self) -> int | None:
        """Largest token that the data can yield, plus one; None if unknown."""
        ...

    @property
    def validation_tokens(self) -> int:
        """Number of held-out tokens; 0 for no validation."""
        ...

    @property
    def byte_entropy(self) -> float | None:
        """Entropy of the byte frequencies, nats; None if unknown or if the tokens are not bytes."""
        ...

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields this rank's held-out batches, shaped as in `microbatches`; equally many on every rank."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; an empty list if only tokens are known."""
        ...

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Returns readable text."""
        ...

    def describe(self) -> str:
        """Returns a one-line description."""
        ...


def rank_samples(turn: int, *, rank: int, plan: Plan) -> NDArray[np.int64]:
    """Returns the `plan.microbatch` sample numbers of a rank in a turn.

    All ranks together take consecutive numbers, turn after turn.
    """
    first = (turn * plan.world_size + rank) * plan.microbatch
    return np.arange(first, first + plan.microbatch, dtype=np.int64)
