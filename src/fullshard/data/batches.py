"""Interfaces between the training loop and its data."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fullshard.spec.plan import Plan

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""


class MicrobatchSource(Protocol):
    """A source of microbatches without a position: the samples of a step depend only on the step's number."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the `plan.accumulation` microbatches of this rank for step `step` (from 0).

        Each is passed to the loss unchanged. For a given step, all ranks together must yield the same samples
        for any number of ranks, so that a run resumed on a different number continues exactly.
        """
        ...


class TrainingData(MicrobatchSource, Protocol):
    """The data of a run, as `build_data` returns it: training microbatches and held-out batches.

    vocabulary: largest token that the data can yield, plus one; None if unknown
    validation_tokens: number of held-out tokens; 0 for no validation
    byte_entropy: entropy of the byte frequencies, nats; None if unknown or if the tokens are not bytes
    """

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def validation_tokens(self) -> int: ...

    @property
    def byte_entropy(self) -> float | None: ...

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields this rank's held-out batches, shaped as in `microbatches`; the same number on every rank."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; an empty list if the data has no tokenizer."""
        ...

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Returns the text of `tokens`; their numbers if the data has no tokenizer."""
        ...

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        ...


def microbatch_sample_numbers(turn: int, *, rank: int, plan: Plan) -> NDArray[np.int64]:
    """Returns the numbers of the `plan.microbatch` samples in a rank's microbatch `turn`, counted from 0.

    All ranks together take consecutive sample numbers, microbatch after microbatch.
    """
    first = (turn * plan.world_size + rank) * plan.microbatch
    return np.arange(first, first + plan.microbatch, dtype=np.int64)
