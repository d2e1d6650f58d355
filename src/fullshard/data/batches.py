"""What the training loop asks of its data."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fullshard.spec.plan import Plan

IGNORED_LABEL = -100
"""The label of a position that the loss leaves out."""


class Batches(Protocol):
    """A source of microbatches without a position of its own: what a step trains on follows from the step."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """`plan.accumulation` microbatches for this rank, of step `step` (from 0).

        Each goes to the loss as it is. Together the ranks must yield the same samples for a step at any
        number of ranks, so that a run resumed on others goes on exactly.
        """
        ...


class Data(Batches, Protocol):
    """What `build_data` gives: batches, something held out of them, and what to tell of them."""

    @property
    def vocabulary(self) -> int | None:
        """The largest token that it can yield, plus one; None where that is not known."""
        ...

    @property
    def validation_tokens(self) -> int:
        """Tokens that are held out; 0 for no validation."""
        ...

    @property
    def byte_entropy(self) -> float | None:
        """In nats, where the tokens are bytes and their frequencies are known."""
        ...

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """This rank's share of what is held out, as `microbatches`; as many on every rank."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; none where only tokens are known."""
        ...

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Text for people."""
        ...

    def describe(self) -> str:
        """One line for people."""
        ...


def rank_samples(turn: int, *, rank: int, plan: Plan) -> NDArray[np.int64]:
    """The `plan.microbatch` numbers that fall to a rank in a turn, where all ranks count on together."""
    first = (turn * plan.world_size + rank) * plan.microbatch
    return np.arange(first, first + plan.microbatch, dtype=np.int64)
