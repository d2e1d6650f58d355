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
        """Yields the `plan.accumulation` microbatches of data rank `rank` for step `step` (from 0).

        rank: from 0 to `plan.data_parallel_degree` - 1; ranks that share sequences have the same data rank

        Each is passed to the loss unchanged, or if ranks share sequences, this rank's part of them. For a
        given step, all data ranks together must yield the same samples for any number of them, so that a run
        resumed on a different number continues exactly.
        """
        ...


class RowSource(MicrobatchSource, Protocol):
    """A source that can also begin between two steps, so that runs continue exactly with another batch.

    takes_any_row: whether `microbatches_at_row` can be called
    row_order: text that differs if row i is another one: other content, seed, packing …; None if unknown
    """

    @property
    def takes_any_row(self) -> bool: ...

    @property
    def row_order(self) -> str | None: ...

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields as `microbatches` does, for the step whose first row is `row`."""
        ...


class TrainingData(MicrobatchSource, Protocol):
    """The data of a run, as `build_data` returns it: training microbatches and held-out batches.

    training_sequences: number of training sequences, of which an epoch has each once; None if unknown
    vocabulary: largest token that the data can yield, plus one; None if unknown
    validation_tokens: number of held-out tokens; 0 for no validation
    byte_entropy: entropy of the byte frequencies, nats; None if unknown or if the tokens are not bytes
    """

    @property
    def training_sequences(self) -> int | None: ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def validation_tokens(self) -> int: ...

    @property
    def byte_entropy(self) -> float | None: ...

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields a data rank's held-out batches, shaped as in `microbatches`; equally many for each."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; an empty list if the data has no tokenizer."""
        ...

    def decode(self, tokens: Tensor | Iterable[int]) -> str:
        """Returns the text of `tokens`; their numbers if the data has no tokenizer."""
        ...

    def describe(self) -> str:
        """Returns a description of the data: one line, and one for each warning or record left out."""
        ...


def microbatch_sample_numbers(turn: int, *, rank: int, plan: Plan) -> NDArray[np.int64]:
    """Returns the numbers of the `plan.microbatch` samples in a data rank's microbatch `turn`, from 0.

    All data ranks together take consecutive sample numbers, microbatch after microbatch.
    """
    first = (turn * plan.data_parallel_degree + rank) * plan.microbatch
    return np.arange(first, first + plan.microbatch, dtype=np.int64)
