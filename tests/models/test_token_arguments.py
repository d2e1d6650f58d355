"""Documents packed into a row give the logits that each gives alone, whatever the model and its attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.models.loss import position_and_document_arguments
from fullshard.parallel.materialize import materialize
from tests.fakes.architectures_hf import CAUSAL, LENGTH, VOCABULARY
from tests.models.test_architectures_hf import built

QUICK = ("llama", "gemma3", "gpt2")  # one mask; one for each kind of layer; learned positions
CUTS = (5, 9)  # where the second document of a row begins
SOME = [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in CAUSAL if n != "bloom"]


def packed() -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    index = torch.arange(LENGTH)
    second = torch.stack([index >= cut for cut in CUTS])
    positions = torch.stack([torch.where(index >= cut, index - cut, index) for cut in CUTS])
    ends = torch.tensor([[cut, LENGTH, LENGTH, LENGTH] for cut in CUTS], dtype=torch.int32)
    return {"tokens": tokens, "positions": positions, "documents": second.long(), "document_ends": ends}


def logits_of(model: nn.Module, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
    output = model(tokens, **arguments)
    return getattr(output, "logits", output)


def alone(model: nn.Module, tokens: Tensor) -> Tensor:
    rows = [
        torch.cat([logits_of(model, part, {})[0] for part in (row[None, :cut], row[None, cut:])])
        for row, cut in zip(tokens, CUTS, strict=True)
    ]
    return torch.stack(rows)


def check_apart(model: nn.Module) -> None:
    """With the ends of the documents, from which attention may do without a mask, and without them."""
    batch = packed()
    tokens, masked = batch["tokens"], {key: one for key, one in batch.items() if key != "document_ends"}
    model.eval()
    with torch.no_grad():
        expected = alone(model, tokens)
        for one in (masked, batch):
            seen = logits_of(model, tokens, position_and_document_arguments(model, one))
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits_of(model, batch["tokens"], {}), seen, atol=1e-3)


@pytest.mark.parametrize("name", SOME)
def test_documents_of_a_row_do_not_see_each_other(name: str) -> None:
    check_apart(materialize(built(name, "data.document_mask=true")[0], seed=0))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_stay_apart_in_every_attention(attention: str) -> None:
    check_apart(materialize(built("mistral", f"model.attention={attention}")[0], seed=0))


@pytest.mark.long
def test_the_flex_mask_is_the_dense_mask() -> None:
    """Its mask keeps the same pairs as the dense one: the kernel itself wants a GPU, or a compiler."""
    flex, dense = (built("mistral", f"model.attention={kind}")[0] for kind in ("flex_attention", "sdpa"))
    blocks = position_and_document_arguments(flex, packed())["attention_mask"]
    sees = torch.stack(
        [
            blocks.mask_mod(
                torch.tensor(row), torch.tensor(0), torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
            )
            for row in range(2)
        ]
    )
    assert torch.equal(sees, position_and_document_arguments(dense, packed())["attention_mask"][:, 0])


def test_a_batch_without_positions_or_documents_adds_no_model_arguments() -> None:
    assert position_and_document_arguments(nn.Identity(), {"tokens": packed()["tokens"]}) == {}


def test_positions_that_are_missing_follow_from_the_documents() -> None:
    batch = packed()
    expected = batch.pop("positions")
    assert torch.equal(position_and_document_arguments(built("llama")[0], batch)["position_ids"], expected)


def test_a_model_that_cannot_keep_documents_apart_is_refused() -> None:
    with pytest.raises(TrainError, match="data.document_mask = false"):
        position_and_document_arguments(nn.Linear(2, 2), packed())
    with pytest.raises(TrainError, match="Bloom"):
        position_and_document_arguments(built("bloom")[0], packed())
