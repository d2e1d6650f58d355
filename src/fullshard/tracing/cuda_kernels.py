"""Routes operations with fused CUDA kernels to those kernels' code paths, on CPU tensors.

A CPU build of torch cannot create fake CUDA tensors, and on CPU tensors these functions take other paths: RMS
norm decomposes and keeps several copies, dropout uses a float mask, attention uses another layout. While a
model is described for a GPU, they call the fused operations instead, whose output shapes are known on any
device.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_DECOMPOSED: ContextVar[bool] = ContextVar("_DECOMPOSED", default=False)


def _cuda_attention(  # signature: aten::scaled_dot_product_attention  # noqa: PLR0913, PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    half, grouped = query.dtype in (torch.float16, torch.bfloat16), key.shape[1] != query.shape[1]
    if attn_mask is None and half:  # the kernel supports grouped heads and reads their number off the shapes
        return _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if grouped:  # the kernel that supports masks and fp32 does not support grouped key/value heads
        return _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _cuda_rms_norm(  # signature: aten::rms_norm
    value: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if _DECOMPOSED.get():
        mean = value.float().square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
        rows = torch.finfo(value.dtype).eps if eps is None else eps
        normal = (value.float() * (mean + rows).rsqrt()).to(value.dtype)
        return normal if weight is None else normal * weight
    if weight is None or tuple(weight.shape) != tuple(normalized_shape):
        weight = torch.ones(normalized_shape, dtype=value.dtype)
    return cast(Tensor, _FusedRmsNorm.apply(value, weight))


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm as one kernel per direction, which saves its input and one fp32 number per row.

    Only shapes and dtypes are right; the values are not.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        rows = value.shape[: value.ndim - weight.ndim]
        ctx.save_for_backward(value, weight, value.new_empty(rows, dtype=torch.float32))
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, weight, _ = ctx.saved_tensors
        return gradients[0] * value, torch.empty_like(weight)


def _cuda_dropout(value: Tensor, p: float, train: bool) -> Tensor:  # signature: aten::dropout
    return _ATEN.native_dropout(value, p, train)[0] if train and p > 0 else value


@contextmanager
def decompose_fused_norms() -> Generator[None]:
    """Makes RMS norm the operations that a compiler makes of it while active, which it fuses with others."""
    token = _DECOMPOSED.set(True)
    try:
        yield
    finally:
        _DECOMPOSED.reset(token)


@contextmanager
def emulate_cuda_kernels() -> Generator[None]:
    """Makes CPU tensors of this process take CUDA's code paths while active. For fake tensors only."""
    library: Any = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    try:
        library.impl("scaled_dot_product_attention", _cuda_attention, "AutogradCPU")
        library.impl("dropout", _cuda_dropout, "AutogradCPU")
        library.impl("rms_norm", _cuda_rms_norm, "AutogradCPU")
        yield
    finally:
        library._destroy()  # pyright: ignore[reportPrivateUsage]
