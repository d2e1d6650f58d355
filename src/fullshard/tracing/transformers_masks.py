"""Models of transformers, traced on fake tensors as they would compute on real ones.

They ask whether positions begin anew within a row, to keep packed documents apart. Of tensors that hold no
numbers they cannot know, so they take it that they do: a mask is made, which attention then takes instead of
its causal kernel, and what is traced is another computation than the one that will run (torch 2.13,
transformers 5). Where documents are to be kept apart, the batch has a mask of its own, and nobody asks.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def assume_one_document_per_row() -> Generator[None]:
    """While it is open, models of transformers in this process take rows for one document each."""
    masks: ModuleType | None = sys.modules.get(_MASKS)
    if masks is None or not hasattr(masks, _ASKS):
        yield
        return
    asks = getattr(masks, _ASKS)
    setattr(masks, _ASKS, _one_document)
    try:
        yield
    finally:
        setattr(masks, _ASKS, asks)


def _one_document(position_ids: object) -> None:
    del position_ids
