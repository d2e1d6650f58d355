"""Attention is traced with the kernel that torch chooses on the GPU, and keeps what that kernel keeps."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from fullshard.distributed.tensors import storage_key
from fullshard.planner.describe.describe_run import build_spec_key, describe_run
from fullshard.planner.describe.emulation import emulate_cuda_kernels
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.run import Run
from tests.parallel.operations import CountOperations

KERNELS: tuple[AttentionKernel, ...] = ("flash", "cudnn")
BATCH, HEADS, LENGTH = 2, 4, 64
SMALL = (
    *("model.d_model=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.vocabulary=256"),
    *("data.sequence_length=64", "precision.mode=bf16", "recompute.mode=none"),
)


def attention_kernels(calls: CountOperations) -> list[str]:
    """Returns the kernels of attention that ran, in order."""
    prefix = "aten::_scaled_dot_product_"
    return [name.removeprefix(prefix) for name in calls.counts if name.startswith(prefix)]


def attend(kernel: str, *, dtype: torch.dtype, masked: bool, grouped: bool, width: int):
    """Returns (kernels of forward and backward, bytes saved for backward beyond the inputs)."""
    inside: dict[object, int] = {}
    with emulate_cuda_kernels(kernel), FakeTensorMode(), CountOperations() as calls:
        shape = (BATCH, HEADS, LENGTH, width)
        query = torch.empty(shape, dtype=dtype, requires_grad=True)
        key, value = (
            torch.empty(
                BATCH, HEADS // 2 if grouped else HEADS, LENGTH, width, dtype=dtype, requires_grad=True
            )
            for _ in range(2)
        )
        mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool) if masked else None
        given = {storage_key(tensor) for tensor in (query, key, value)}

        def keep(tensor: Tensor) -> Tensor:
            if storage_key(tensor) not in given:
                inside[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=grouped
            )
        out.sum().backward()
        assert [tensor.grad.shape for tensor in (query, key, value)] == [query.shape, key.shape, value.shape]
    return attention_kernels(calls), sum(inside.values())


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked", "width", "runs"),
    [
        ("flash", torch.bfloat16, False, 16, "flash_attention"),
        ("cudnn", torch.bfloat16, False, 16, "flash_attention"),
        ("flash", torch.float16, True, 16, "efficient_attention"),
        ("cudnn", torch.float16, True, 16, "cudnn_attention"),
        ("cudnn", torch.bfloat16, True, 192, "efficient_attention"),
        ("cudnn_256", torch.bfloat16, True, 256, "cudnn_attention"),
        ("cudnn_256", torch.bfloat16, True, 264, "efficient_attention"),
        ("cudnn_256", torch.bfloat16, False, 264, "efficient_attention"),
        ("cudnn", torch.float32, True, 16, "efficient_attention"),
        ("cudnn", torch.float32, False, 16, "efficient_attention"),
    ],
)
def test_emulated_attention_kernel_equals_torchs_choice(kernel, dtype, masked, width, runs):
    names, _ = attend(kernel, dtype=dtype, masked=masked, grouped=False, width=width)
    assert names == [runs, f"{runs}_backward"]


def test_masked_attention_with_grouped_heads_has_cudnns_kernel_and_no_scores_per_head():
    names, saved = attend("cudnn", dtype=torch.bfloat16, masked=True, grouped=True, width=16)
    assert names == ["cudnn_attention", "cudnn_attention_backward"]
    rows = BATCH * HEADS * LENGTH
    mask = 2 * BATCH * LENGTH**2  # additive, in the dtype of the queries, one for all heads
    assert 0 <= saved - (2 * rows * 16 + 4 * rows + mask) <= 16, (
        "output, one number a row, mask, random state"
    )
    _, elsewhere = attend("flash", dtype=torch.bfloat16, masked=True, grouped=True, width=16)
    assert elsewhere >= saved - 16


def test_attention_kernel_is_in_the_key_of_models_that_may_mask():
    one_trace = ("recompute.mode=none", "run.compile=false")
    decoder = Run.load(overrides=[*SMALL, *one_trace, "data.document_mask=true"])
    flash, cudnn = (describe_run(decoder, "cuda", attention_kernel=one, cached=False) for one in KERNELS)
    assert flash == cudnn
    prefers_cudnn = "_cudnn_rejection_reasons" in vars(varlen)  # for whole rows, since torch 2.15
    assert {kernel.by_flash for kernel in flash.kernels if kernel.head_dim} == {not prefers_cudnn}
    config = Path(__file__).parents[3] / "examples" / "smollm3" / "config.json"
    other = Run.load(overrides=[f"model.hf={config}", "model.weights=none", *one_trace])
    for run, count in ((decoder, 1), (other, 2)):
        keys = [build_spec_key(run, "cuda", attention_kernel=one) for one in KERNELS]
        assert len({key.file_name for key in keys if key is not None}) == count


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_narrower_than_keys_keep_their_width(kernel: str):
    """Multi-head latent attention (DeepSeek) has heads of 192 in queries and keys, and of 128 in values."""
    with emulate_cuda_kernels(kernel), FakeTensorMode(), CountOperations() as calls:
        wide, narrow = (
            torch.empty(BATCH, HEADS, LENGTH, width, dtype=torch.bfloat16, requires_grad=True)
            for width in (192, 128)
        )
        out = F.scaled_dot_product_attention(wide, wide, narrow, is_causal=True)
        out.sum().backward()
    assert out.shape == narrow.shape
    assert narrow.grad is not None
    assert narrow.grad.shape == narrow.shape
    assert attention_kernels(calls) == ["efficient_attention", "efficient_attention_backward"]
