"""Training data: tokens in an order that depends only on the seed and the step.

Names are imported on first use, because the tokenizing processes do not need torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.data.batches import IGNORED_LABEL as IGNORED_LABEL
    from fullshard.data.batches import Batches as Batches
    from fullshard.data.batches import Data as Data
    from fullshard.data.build import build_data as build_data
    from fullshard.data.prefetch import prefetch_batches as prefetch_batches
    from fullshard.data.text import TextData as TextData

_HOMES = {
    "IGNORED_LABEL": "batches",
    "Batches": "batches",
    "Data": "batches",
    "build_data": "build",
    "prefetch_batches": "prefetch",
    "TextData": "text",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
