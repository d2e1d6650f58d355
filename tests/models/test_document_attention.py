"""Attention within documents equals attention to each alone; on a GPU without a mask of all pairs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.models.decoder import DecoderModel
from fullshard.models.document_attention import (
    QueryKeyValue,
    attend_within_documents,
    disable_cudnn_attention_with_nan_gradients,
    document_bounds_if_supported,
    square_mask,
)
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.parallel.recompute import apply_recompute
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.describe.emulation import emulate_cuda_kernels
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.spec.settings.train_section import RecomputeSection
from tests.models.test_architectures_hf import built

ROWS, LENGTH, HEADS, CHANNELS, VOCABULARY = 2, 24, 4, 8, 41
ENDS = ((5, 6, 17, LENGTH), (LENGTH, LENGTH, LENGTH, LENGTH))
_CPU_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def bounds_of(ends: Any = ENDS, *, device: str = "cpu") -> Tensor:
    found = document_bounds_if_supported(
        torch.tensor(ends, dtype=torch.int32, device=device), sequence_length=LENGTH
    )
    assert found is not None
    return found


def heads_of(kv_heads: int, dtype: torch.dtype, *, device: str = "cpu") -> QueryKeyValue:
    random = torch.Generator().manual_seed(0)
    counts = (HEADS, kv_heads, kv_heads)
    shapes = ((ROWS, count, LENGTH, CHANNELS) for count in counts)
    made = (torch.randn(shape, generator=random, dtype=dtype) for shape in shapes)
    return QueryKeyValue(*(one.to(device).requires_grad_() for one in made))


def with_gradients(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.arange(y.numel(), dtype=y.dtype, device=y.device).view_as(y).cos()
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


def masked(inputs: Sequence[Tensor], *, window: int | None = None, scale: float | None = None) -> Tensor:
    mask = square_mask(bounds_of(device=inputs[0].device.type), rows=ROWS, length=LENGTH, window=window)
    y = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


class Recorded(TorchDispatchMode):
    """Names of operations, and the shapes of the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        self.shapes |= {one.shape for one in tensors if isinstance(one, Tensor)}
        return result

    def holds_all_pairs(self, length: int) -> bool:
        return any(shape[-2:] == (length, length) for shape in self.shapes)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_attention_equals_attention_to_each_document_alone(kv_heads: int, window: int | None) -> None:
    inputs = heads_of(kv_heads, torch.float64)
    seen = attend_within_documents(inputs, bounds_of(), scale=0.3, window=window)
    expected = torch.empty_like(seen)
    for row, ends in enumerate(ENDS):
        for begin, end in zip((0, *ends), ends, strict=False):
            if begin < end:
                near = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
                near = near if window is None else near.triu(1 - window)
                alone = [one[row : row + 1, :, begin:end] for one in inputs]
                y = scaled_dot_product_attention(*alone, attn_mask=near, scale=0.3, enable_gqa=True)
                expected[row, begin:end] = y[0].transpose(0, 1)
    for one, other in zip(with_gradients(seen, inputs), with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels", [CHANNELS - 4, CHANNELS + 4])
def test_values_may_have_other_channels_than_keys(channels: int) -> None:
    query, key, _ = heads_of(2, torch.float64)
    value = torch.randn(ROWS, 2, LENGTH, channels, dtype=torch.float64, requires_grad=True)
    inputs = QueryKeyValue(query, key, value)
    seen, expected = attend_within_documents(inputs, bounds_of()), masked(inputs)
    for one, other in zip(with_gradients(seen, inputs), with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at inputs that are not leaves
def test_another_number_of_documents_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = decoder()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True, dynamic=False)
    compiled: list[int] = []
    for count in (1, 2, 8, 16):
        ends = torch.tensor([[*range(1, count), LENGTH]] * ROWS, dtype=torch.int32)
        next_token_loss(model, packed() | {"document_ends": ends})[0].backward()
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] > 0


def decoder() -> DecoderModel:
    config = DecoderConfig(
        vocabulary=VOCABULARY, d_model=16, heads=HEADS, kv_heads=2, d_ff=24, layers=2, max_sequence=LENGTH
    )
    with torch.device("meta"):
        return materialize(DecoderModel(config), seed=0)


def packed() -> dict[str, Tensor]:
    ends = torch.tensor(ENDS, dtype=torch.int32)
    index = torch.arange(LENGTH)
    documents = (index[None, :, None] >= ends[:, None, :]).sum(-1)
    begins = torch.nn.functional.pad(ends, (1, 0))[:, :-1].gather(1, documents)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1).masked_fill(documents != documents.roll(-1, 1), -100)
    positions = index - begins
    return dict(tokens=tokens, labels=labels, documents=documents, positions=positions, document_ends=ends)


def loss_and_gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    total, _ = next_token_loss(model, batch)
    return [total, *torch.autograd.grad(total, list(model.parameters()), allow_unused=True)]


def alone_losses(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Sums over documents, each in a batch of its own."""
    sums: list[Any] = []
    for row, ends in enumerate(ENDS):
        for begin, end in zip((0, *ends), ends, strict=False):
            if begin == end:
                continue
            part = {name: batch[name][row : row + 1, begin:end] for name in ("tokens", "labels")}
            found = loss_and_gradients(model, part)
            sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
    return sums


@pytest.mark.parametrize("name", ["decoder", "llama", "mistral", "gpt2"])
def test_a_packed_row_gives_the_loss_and_gradients_of_its_documents(name: str) -> None:
    settings = ("data.document_mask=true", f"model.options.max_position_embeddings={LENGTH}")
    if name == "gpt2":
        settings = settings[:1]
    model = decoder() if name == "decoder" else materialize(built(name, *settings)[0], seed=0)
    batch = packed()
    seen = loss_and_gradients(model, batch)
    for one, other in zip(seen, alone_losses(model, batch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_selective_recompute_saves_it() -> None:
    counts: dict[str, Counter[str]] = {}
    for mode in ("selective", "full"):
        model: Any = decoder()
        apply_recompute(list(model.blocks), RecomputeSection(mode=mode))
        with Recorded() as recorded:
            next_token_loss(model, packed())[0].backward()
        counts[mode] = recorded.counts
    assert counts["selective"][_CPU_KERNEL] == 2
    assert counts["full"][_CPU_KERNEL] == 4


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_described_for_a_gpu_it_is_the_varlen_kernel_in_half_precision(
    dtype: torch.dtype, kernels: int
) -> None:
    """In full precision, which the kernel does not compute, it is a mask of all pairs."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = QueryKeyValue(*map(fakes.from_tensor, heads_of(2, dtype)))
    with emulate_cuda_kernels(), fakes, Recorded() as recorded:
        y = attend_within_documents(inputs, bounds_of())
        y.sum().backward()
    assert y.shape == (ROWS, LENGTH, HEADS, CHANNELS)
    assert recorded.counts["torch_attn::_varlen_attn"] == kernels
    assert recorded.counts["torch_attn::_varlen_attn_backward"] == kernels
    assert recorded.holds_all_pairs(LENGTH) == (not kernels)


def test_documents_count_as_causal_attention_over_the_sequence() -> None:
    """For a GPU, a document mask changes no FLOP of the attention kernels."""
    settings = [
        "model.layers=1",
        "precision.mode=bf16",
        "recompute.mode=none",
        "run.compile=false",
        f"data.sequence_length={LENGTH}",
    ]
    found = list[set[tuple[str, bool, float]]]()
    for documents in ("false", "true"):
        run = Run.load(overrides=[*settings, f"data.document_mask={documents}"])
        spec = describe_run(run, "cuda", cached=False)
        kernels = [kernel for kernel in spec.kernels if kernel.kind.startswith("attention")]
        found.append({(kernel.kind, kernel.causal, kernel.flops.value_at(1)) for kernel in kernels})
    assert found[0] == found[1]
    assert found[0]


def test_off_a_gpu_cudnn_is_left_alone() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    disable_cudnn_attention_with_nan_gradients(torch.device("cpu"), sequence_length=64)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@GPU
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_on_a_gpu_it_equals_attention_with_a_mask(kv_heads: int, window: int | None) -> None:
    inputs = heads_of(kv_heads, torch.bfloat16, device="cuda")
    with Recorded() as recorded:
        seen = attend_within_documents(inputs, bounds_of(device="cuda"), window=window)
    assert recorded.counts["torch_attn::_varlen_attn"] == 1
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = with_gradients(masked(exact, window=window), exact)
    for one, other in zip(with_gradients(seen, inputs), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


@GPU
@pytest.mark.parametrize("length", [64, 192, 256])
def test_on_a_gpu_gradients_with_a_mask_are_finite(length: int) -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        disable_cudnn_attention_with_nan_gradients(torch.device("cuda"), sequence_length=length)
        inputs = [
            torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        documents = torch.arange(length, device="cuda") // 50
        mask = (documents[:, None] == documents).tril()[None, None]
        y = scaled_dot_product_attention(*inputs, attn_mask=mask)
        assert all(one.isfinite().all() for one in with_gradients(y, inputs))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
