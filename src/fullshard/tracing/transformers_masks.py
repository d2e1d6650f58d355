"""Makes transformers models trace the same computation on fake tensors as they run on real ones.

These models check whether positions restart within a row, to separate packed documents. With fake tensors
they cannot know, so they assume that positions do restart and build a mask. Attention then uses the mask
instead of its causal kernel, and the trace differs from the real run (torch 2.13, transformers 5). A batch
that does separate documents has its own mask, and the check does not run.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

_MASKS, _ASKS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def assume_one_document_per_row() -> Generator[None]:
    """Makes transformers models in this process treat each row as one document while active."""
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
