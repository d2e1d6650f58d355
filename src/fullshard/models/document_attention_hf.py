"""Attention within documents as an attention implementation of transformers. Needs the extra `hf`."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fullshard.models.context_attention import ContextParallel
from fullshard.models.document_attention import (
    QueryKeyValue,
    attend_within_documents,
    is_document_bounds,
    square_mask,
)

DOCUMENT_ATTENTION = "fullshard_documents"
"""Beginning of the names of the implementation among those of transformers."""
# Declarations of a model class: attention is looked up by name, and takes its sliding window as an argument.
DECLARED = ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa")
_SDPA = "sdpa"


def use_document_attention(model: nn.Module, *, context: ContextParallel | None = None) -> bool:
    """Makes a transformers model attend within documents without a mask of all pairs, if it is able to.

    These are models that would use `sdpa`, and whose class declares that attention is exchangeable. They then
    take document bounds as `attention_mask` (see `document_attention`); without them, they use `sdpa`.

    context: how attention reaches the keys of other ranks; None if each rank has whole sequences

    Returns whether the model is able to.
    """
    config: Any = model.config
    replaceable = config._attn_implementation == _SDPA or uses_document_attention(config)
    if not replaceable or not all(getattr(model, name, False) for name in DECLARED):
        return False
    attention: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks: Any = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    # Models of one process may differ, and transformers knows a function by its name alone.
    name = DOCUMENT_ATTENTION if context is None else f"{DOCUMENT_ATTENTION}_{context.name}"
    attention.register(name, _make_attention(attention[_SDPA], context))
    masks.register(name, masks[_SDPA])
    config._attn_implementation = name
    return True


def uses_document_attention(config: Any) -> bool:
    """Returns whether the transformers model of `config` attends by `use_document_attention`."""
    return str(getattr(config, "_attn_implementation", "")).startswith(DOCUMENT_ATTENTION)


def _make_attention(sdpa: Callable[..., Any], context: ContextParallel | None) -> Callable[..., Any]:
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
        if context is not None:
            context.check_bounds_are_given(mask, training=module.training)
        if mask is not None and is_document_bounds(mask):
            inputs, window = QueryKeyValue(query, key, value), sliding_window or None
            more = (kwargs.get(name) for name in ("position_bias", "softcap", "s_aux"))
            if not dropout and all(one is None for one in more):
                attend = context.attend if context else attend_within_documents
                return attend(inputs, mask, scale=scaling, window=window), None
            if context is not None:
                (query, key, value), mask = context.gather_for_masked_attention(inputs, mask, window=window)
            else:
                rows, _, length, _ = query.shape
                mask = square_mask(mask, rows=rows, length=length, window=window)
        return sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)

    return attend
