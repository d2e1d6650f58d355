"""Attention within documents as an attention implementation of transformers. Needs the extra `hf`."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fullshard.models.document_attention import (
    QueryKeyValue,
    attend_within_documents,
    is_document_bounds,
    square_mask,
)

DOCUMENT_ATTENTION = "fullshard_documents"
"""Name of the implementation among those of transformers."""
# Declarations of a model class: attention is looked up by name, and takes its sliding window as an argument.
_DECLARED = ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa")
_SDPA = "sdpa"


def use_document_attention(model: nn.Module) -> None:
    """Makes a transformers model attend within documents without a mask of all pairs, if it is able to.

    These are models that would use `sdpa`, and whose class declares that attention is exchangeable. They then
    take document bounds as `attention_mask` (see `document_attention`); without them, they use `sdpa`.
    """
    config: Any = model.config
    if config._attn_implementation != _SDPA or not all(getattr(model, name, False) for name in _DECLARED):
        return
    attention: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks: Any = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    attention.register(DOCUMENT_ATTENTION, _make_attention(attention[_SDPA]))
    masks.register(DOCUMENT_ATTENTION, masks[_SDPA])
    config._attn_implementation = DOCUMENT_ATTENTION


def _make_attention(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an attention function of transformers; `sdpa` is transformers' own, for all other cases."""

    def attend(  # signature: transformers' attention interface  # noqa: PLR0913, PLR0917
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        mask = attention_mask
        if mask is not None and is_document_bounds(mask):
            inputs, window = QueryKeyValue(query, key, value), sliding_window or None
            more = (kwargs.get(name) for name in ("position_bias", "softcap", "s_aux"))
            if not dropout and all(one is None for one in more):
                y = attend_within_documents(inputs, mask, scale=scaling, window=window)
                return y, None
            rows, _, length, _ = query.shape
            mask = square_mask(mask, rows=rows, length=length, window=window)
        return sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)

    return attend
