"""What the training loop asks of its data."""

from collections.abc import Iterator
from typing import Any, Protocol

from fullshard.spec.plan import Plan


class Batches(Protocol):
    """A source of microbatches without a position of its own: what a step trains on follows from the step."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """`plan.accumulation` microbatches for this rank, of step `step` (from 0).

        Each goes to the loss as it is. Together the ranks must yield the same samples for a step at any
        number of ranks, so that a run resumed on others goes on exactly.
        """
        ...
