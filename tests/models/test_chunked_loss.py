"""Logits in chunks: the loss and gradients of whole logits, and never a whole tensor of them."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.models.chunked_loss import Rows, chunked_cross_entropy
from fullshard.models.decoder import DecoderModel
from fullshard.models.deferred_logits import WholeLogitsWarning
from fullshard.parallel.materialize import materialize
from fullshard.spec.settings.model_section import DecoderConfig
from tests.fakes.architectures_hf import CAUSAL, CONFIGS, VOCABULARY, batch_of
from tests.models.test_architectures_hf import built, of_transformers

LENGTH = 12


class Capped(nn.Module):
    """A head whose logits are scaled, capped and cast after it, and a bias."""

    def __init__(self, cap: float = 3.0) -> None:
        super().__init__()
        self.embedding, self.head, self.cap = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY), cap

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens).tanh().to(self.head.weight.dtype)) / self.cap
        return self.cap * torch.tanh(logits).float()


class Tempered(Capped):
    """Learns by how much its logits are scaled, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.temperature.exp() + self.bias


class Masked(Capped):
    """Needs its logits whole: it forbids a token."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        logits[..., 3] = -100.0
        return logits


class Seen(TorchDispatchMode):
    """The most rows of logits in any tensor that an operation returns."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.ndim and one.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, one.numel() // VOCABULARY)
        return result


def batch(seed: int = 0) -> dict[str, Tensor]:
    return batch_of("llama", seed, sequences=3)


def loss_and_gradients(
    model: nn.Module, rows: Rows, *, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    one = batch()
    total, _ = chunked_cross_entropy(
        model, lambda: model(one["tokens"]), labels=one["labels"], weights=weights, chunk_rows=rows
    )
    (total / 64).backward()
    return total.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_chunks_change_nothing(model: nn.Module, rows: Rows = 5, weights: Tensor | None = None) -> None:
    whole, chunked = (loss_and_gradients(model, one, weights=weights) for one in (0, rows))
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-6, atol=0)
    assert chunked[1].keys() == whole[1].keys()
    largest = max(gradient.norm() for gradient in whole[1].values())
    for name, gradient in whole[1].items():  # some are zero but for rounding
        assert (chunked[1][name] - gradient).norm() <= 4e-6 * gradient.norm() + 1e-9 * largest, name


def with_values(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("name", CAUSAL)
def test_families_of_transformers_lose_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = of_transformers(name)
    with Seen() as seen:
        loss_and_gradients(model, 5)
    assert seen.rows < 3 * LENGTH  # the head's weight has as many rows as the model is wide
    check_chunks_change_nothing(model)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.3}),
    ],
)
def test_soft_caps_and_scalings_are_those_of_the_model(kind: str, changed: dict[str, float]) -> None:
    import transformers

    sizes = CONFIGS["gemma2"] | {"model_type": kind} | changed
    config = transformers.CONFIG_MAPPING[kind].from_dict(sizes)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WholeLogitsWarning)
        check_chunks_change_nothing(model)


def test_adapters_of_the_head_are_part_of_it() -> None:
    model, _ = built("llama", "adapter.rank=2", 'adapter.targets=["q_proj", "lm_head"]')
    with_values(materialize(model, seed=0))
    assert any("lm_head.lora_A" in name for name in loss_and_gradients(model, 5)[1])
    check_chunks_change_nothing(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 12, 100, "auto"])
def test_decoders_lose_the_same_with_chunks_of_any_size(rows: Rows, tied: bool) -> None:
    sizes = DecoderConfig(
        d_model=16, layers=2, heads=4, kv_heads=2, d_ff=24, vocabulary=VOCABULARY, max_sequence=16, tied=tied
    )
    check_chunks_change_nothing(with_values(DecoderModel(sizes)), rows)


def test_biases_casts_caps_and_weights_of_labels_are_kept() -> None:
    weights = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(2))
    check_chunks_change_nothing(with_values(Capped()))
    check_chunks_change_nothing(with_values(Tempered()))
    check_chunks_change_nothing(with_values(Capped()), weights=weights)


def test_a_frozen_head_and_a_head_alone_have_the_gradients_of_whole_logits() -> None:
    model = with_values(Capped())
    model.head.requires_grad_(False)
    check_chunks_change_nothing(model)
    model.requires_grad_(False)
    model.head.bias.requires_grad_(True)
    check_chunks_change_nothing(model)


def test_no_tensor_has_more_rows_of_logits_than_a_chunk() -> None:
    with Seen() as seen:
        loss_and_gradients(with_values(Capped()), 5)
    assert seen.rows == 6  # of the head's weight, transposed
    with Seen() as seen:
        loss_and_gradients(with_values(Capped()), 0)
    assert seen.rows == 3 * LENGTH


def test_without_gradients_only_the_loss_is_computed() -> None:
    model, one = with_values(Capped()), batch()
    with torch.no_grad():
        total, _ = chunked_cross_entropy(
            model, lambda: model(one["tokens"]), labels=one["labels"], chunk_rows=5
        )
    assert not total.requires_grad
    torch.testing.assert_close(total, loss_and_gradients(model, 0)[0])


def test_half_precision_sums_gradients_in_fp32() -> None:
    exact = loss_and_gradients(with_values(Capped()), 0)
    model = with_values(Capped()).bfloat16()
    whole, chunked = (loss_and_gradients(model, rows) for rows in (0, 1))

    def error(result: Any) -> float:
        return float((result[1]["head.weight"].float() - exact[1]["head.weight"]).norm())

    assert error(chunked) < 1.2 * error(whole)


def test_models_that_need_whole_logits_get_them_with_a_warning() -> None:
    model = with_values(Masked())
    with pytest.warns(WholeLogitsWarning, match="__setitem__"):
        chunked = loss_and_gradients(model, 5)
    whole = loss_and_gradients(model, 0)
    assert torch.equal(chunked[0], whole[0])
    assert all(torch.equal(chunked[1][name], one) for name, one in whole[1].items())


def test_the_model_is_as_it_was_afterwards_also_after_an_error() -> None:
    model, one = with_values(Capped()), batch()
    before = dict(vars(model)), list(model.named_modules())

    def fail() -> Iterator[None]:
        model(one["tokens"])
        raise KeyError("in the loss")

    with pytest.raises(KeyError):
        chunked_cross_entropy(model, fail, labels=one["labels"], chunk_rows=5)
    loss_and_gradients(model, 5)
    assert (dict(vars(model)), list(model.named_modules())) == before
    assert isinstance(model(one["tokens"]), Tensor)
    assert "forward" not in vars(model.head)


def test_a_second_backward_is_refused() -> None:
    model, one = with_values(Capped()), batch()
    total, _ = chunked_cross_entropy(model, lambda: model(one["tokens"]), labels=one["labels"], chunk_rows=5)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        total.backward()


def test_ignored_labels_alone_give_zero_loss_and_zero_gradients() -> None:
    model, one = with_values(Capped(cap=1e-4)), batch()
    labels = torch.full_like(one["labels"], -100)
    total, _ = chunked_cross_entropy(model, lambda: model(one["tokens"]), labels=labels, chunk_rows=5)
    total.backward()
    assert total.item() == 0
    assert not any(p.grad.any() for p in model.parameters())


def test_the_output_has_the_shape_and_values_of_the_logits() -> None:
    model, one = with_values(Capped()), batch()
    _, output = chunked_cross_entropy(model, lambda: model(one["tokens"]), labels=one["labels"], chunk_rows=5)
    assert (output.shape, output.dtype) == ((3, LENGTH, VOCABULARY), torch.float32)
    with pytest.warns(WholeLogitsWarning):
        torch.testing.assert_close(output.argmax(-1), model(one["tokens"]).argmax(-1))


def test_default_chunks_begin_at_the_size_that_saves_memory() -> None:
    one, width = batch(), (64 << 20) // (4 * LENGTH)
    for vocabulary, chunked in ((width, False), (width + 1, True)):
        model = Capped()
        model.head = nn.Linear(6, vocabulary)
        with torch.no_grad():
            _, output = chunked_cross_entropy(model, lambda: model(one["tokens"]), labels=one["labels"])  # noqa: B023
        assert (type(output) is not Tensor) == chunked


def test_unlikely_labels_and_large_logits_have_the_loss_and_gradients_of_fp64() -> None:
    """And no row of an ignored label has a gradient."""
    torch.manual_seed(0)
    head, labels = nn.Linear(6, VOCABULARY, bias=False), torch.tensor([[0, 1, -100, 2, 3, 0]])
    hidden = 40 * torch.randn(1, 6, 6)
    found: list[list[Tensor]] = []
    for dtype, rows in ((torch.float64, 0), (torch.float32, 2), (torch.bfloat16, 2)):
        model = Headed(copy.deepcopy(head).bfloat16().to(dtype))
        x = hidden.bfloat16().to(dtype).requires_grad_()
        total, _ = chunked_cross_entropy(model, lambda m=model, x=x: m(x), labels=labels, chunk_rows=rows)
        total.backward()
        found.append([total.detach(), x.grad, model.head.weight.grad])
        assert not x.grad[0, 2].any()
    exact, fp32, half = found
    assert exact[0] > 100, "some labels have a probability below 1e-20"
    for one, other, near in zip(exact, fp32, half, strict=True):
        torch.testing.assert_close(other.double(), one, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(near.double(), one, rtol=0.05, atol=0.05 * float(one.abs().max()))


class Headed(nn.Module):
    """Hidden states come in, and logits go out."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
