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

from fullshard.models.document_attention import emulate_cuda_attention
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.torch_private.fake_tensors import forget_dispatch, unregister

_ATEN = torch.ops.aten
_DECOMPOSED: ContextVar[bool] = ContextVar("_DECOMPOSED", default=False)


class _CudaAttention:
    """Chooses the kernel of `scaled_dot_product_attention` as torch does on a GPU.

    Without a mask, flash attention stands for cuDNN's kernel: both save the output and one fp32 number per
    row. Dropout's random state is a few bytes more.
    """

    def __init__(self, preferred: AttentionKernel) -> None:
        self._preferred: AttentionKernel = preferred
        self._efficient_takes_groups = _efficient_attention_takes_groups()

    def __call__(  # signature: aten::scaled_dot_product_attention  # noqa: PLR0913, PLR0917
        self,
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
        one_width = query.shape[-1] == value.shape[-1]  # latent attention (MLA) has narrower values
        # Flash attention takes heads of one width, and reads the number of grouped heads off the shapes.
        if attn_mask is None and half and one_width:
            return _ATEN._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # each call writes an additive mask
            bias = torch.where(attn_mask.logical_not(), float("-inf"), query.new_zeros(()))
        if half and self._preferred == "cudnn" and _cudnn_takes_heads(query, value):
            return _ATEN._scaled_dot_product_cudnn_attention(
                query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
            )[0]
        if grouped and not self._efficient_takes_groups:
            return _ATEN._scaled_dot_product_attention_math(
                query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        expanded = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        return _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, expanded, True, dropout_p, is_causal, scale=scale
        )[0]


def _cudnn_takes_heads(query: Tensor, value: Tensor) -> bool:
    """Returns whether cuDNN's kernel is for heads of these widths: multiples of 8, of at most 128."""
    return all(width <= 128 and width % 8 == 0 for width in (query.shape[-1], value.shape[-1]))


def _efficient_attention_takes_groups() -> bool:
    """Returns whether this torch's memory-efficient kernel is for fewer key/value heads than query heads."""
    with torch.device("meta"):
        many, few, rows = torch.empty(1, 2, 8, 8), torch.empty(1, 1, 8, 8), torch.empty(1, 2, 8)
        state = [torch.empty((), dtype=torch.int64)] * 2
    wanted = [True, True, True, False]
    gradients = _ATEN._scaled_dot_product_efficient_attention_backward(
        many, many, few, few, None, many, rows, *state, 0.0, wanted
    )
    return gradients[1].shape == few.shape


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
def emulate_cuda_kernels(attention_kernel: AttentionKernel = "flash") -> Generator[None]:
    """Makes CPU tensors of this process take CUDA's code paths while active. For fake tensors only.

    attention_kernel: the kernel that torch prefers on the GPU, where it can be used
    """
    kernels: dict[str, Any] = {
        "scaled_dot_product_attention": _CudaAttention(attention_kernel),
        "dropout": _cuda_dropout,
        "rms_norm": _cuda_rms_norm,
    }
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
            forget_dispatch(getattr(_ATEN, name).default)
        with emulate_cuda_attention():
            yield
    finally:
        unregister(library)
        for name in kernels:
            forget_dispatch(getattr(_ATEN, name).default)
