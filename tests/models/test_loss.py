"""The default loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.models.loss import choose_loss, model_computed_loss, next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.spec.run import Run
from tests.fakes.architectures_hf import batch_of
from tests.models.own import square_loss
from tests.models.test_architectures_hf import built
from tests.training.runs import logged


class Fixed(nn.Module):
    """Gives the same logits for any tokens."""

    def __init__(self, logits: Tensor, *, wrapped: bool = False) -> None:
        super().__init__()
        self.logits, self.wrapped = logits, wrapped

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits) if self.wrapped else self.logits


def example() -> tuple[Tensor, dict[str, Tensor]]:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, -100, 4], [-100, -100, 2]])
    return logits, {"tokens": torch.zeros_like(labels), "labels": labels}


def test_it_sums_over_valid_labels_and_counts_them() -> None:
    logits, batch = example()
    total, count = next_token_loss(Fixed(logits), batch)
    by_hand = -sum(logits.log_softmax(-1)[place] for place in ((0, 0, 0), (0, 2, 4), (1, 2, 2)))
    torch.testing.assert_close(total, by_hand)
    assert count == 3


def test_without_valid_labels_sum_and_count_are_zero() -> None:
    logits, batch = example()
    total, count = next_token_loss(Fixed(logits), batch | {"labels": torch.full((2, 3), -100)})
    assert (total.item(), count.item()) == (0.0, 0)


def test_an_output_with_logits_is_as_good_and_half_precision_is_summed_in_fp32() -> None:
    logits, batch = example()
    total, _ = next_token_loss(Fixed(logits.bfloat16(), wrapped=True), batch)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, next_token_loss(Fixed(logits.bfloat16().float()), batch)[0])


class Pair(Fixed):
    """Returns (logits, loss) as nanoGPT: without targets only the logits of the last token, and no loss."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        return (self.logits[:, [-1]], None) if targets is None else (self.logits, self.logits.sum())


class Last(Fixed):
    """Returns the logits of the last token alone."""

    def forward(self, tokens: Tensor) -> Any:
        return self.logits[:, -1]


@pytest.mark.parametrize("kind", [Pair, Last])
def test_a_model_that_does_not_return_logits_for_each_token_is_refused(kind: type[Fixed]) -> None:
    logits, batch = example()
    with pytest.raises(TrainError, match=r"(?s)does not return logits for each token.*train\.loss = .*\[1\]"):
        next_token_loss(kind(logits), batch)


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"tokens": torch.zeros(1)}, "dict of tokens"),
        ((torch.zeros(1), torch.zeros(1)), "tuple"),
        (torch.zeros(2, 3), "Tensor"),
        (None, "NoneType"),
    ],
)
def test_a_batch_without_tokens_and_labels_is_refused(batch: Any, got: str) -> None:
    with pytest.raises(TrainError, match="needs a batch with tokens and labels") as raised:
        next_token_loss(nn.Identity(), batch)
    assert raised.value.got == got


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "loss_mask"])
def test_values_of_each_token_that_the_loss_does_not_use_are_refused(name: str) -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens, name: torch.ones_like(tokens)}
    with pytest.raises(TrainError, match=f"does not use '{name}'"):
        next_token_loss(nn.Identity(), batch)


@pytest.mark.parametrize("name", ["t5", "bert", "vit"])
def test_the_loss_of_the_model_is_the_mean_over_its_valid_labels(name: str) -> None:
    model, run = built(name)
    assert choose_loss(run, model) is model_computed_loss
    materialize(model, seed=0).eval()
    batch = batch_of(name, 0, sequences=3)
    total, count = model_computed_loss(model, batch)
    assert count == (batch["labels"] != -100).sum()
    torch.testing.assert_close(total / count, model(**batch).loss)


def test_without_a_valid_label_loss_and_gradient_of_the_model_are_zero() -> None:
    model = materialize(built("t5")[0], seed=0)
    batch = batch_of("t5", 0)
    total, count = model_computed_loss(model, batch | {"labels": torch.full_like(batch["labels"], -100)})
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters() if p.grad is not None)


def test_a_model_that_shifts_labels_itself_counts_those_that_it_uses() -> None:
    model = materialize(built("llama")[0], seed=0)
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, -100]])}
    total, count = model_computed_loss(model, batch)
    assert count == 1
    torch.testing.assert_close(total, model(**batch).loss)


def test_a_causal_model_computes_its_loss_from_the_batches_of_a_factory() -> None:
    given = ("data.source=python", "data.factory=tests.models.own:Given")
    model, run = built("llama", *given)
    model, tokens = materialize(model, seed=0), torch.arange(3, 15).reshape(2, 6)
    total, count = choose_loss(run, model)(model, {"input_ids": tokens, "labels": tokens})
    torch.testing.assert_close(total / count, model(input_ids=tokens, labels=tokens).loss)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    as_tokens = choose_loss(run, model)(model, {"tokens": tokens, "labels": labels})
    torch.testing.assert_close(as_tokens[0], total)


def test_a_loss_without_labels_counts_as_one_thing() -> None:
    model = materialize(built("clip")[0], seed=0)
    assert isinstance(model_computed_loss(model, batch_of("clip", 0)), Tensor)


def test_tokens_for_a_model_that_does_not_predict_them_are_refused() -> None:
    with pytest.raises(TrainError, match="on arguments of its own"):
        model_computed_loss(built("bert")[0], {"tokens": torch.ones(1, 2), "labels": torch.ones(1, 2)})


def test_a_model_without_a_loss_is_refused() -> None:
    model, _ = built("vit", "model.architecture=ViTModel")
    batch = {"pixel_values": batch_of("vit", 0)["pixel_values"]}
    with pytest.raises(TrainError, match="ViTModel computes no loss"):
        model_computed_loss(materialize(model, seed=0), batch)


def test_the_loss_that_a_run_names_goes_before_the_models() -> None:
    run = Run.load(overrides=["train.loss=tests.models.own:square_loss"])
    assert choose_loss(run, nn.Identity()) is square_loss
    whole = Run.load(overrides=["train.loss_chunk=0"])
    assert choose_loss(whole, nn.Identity()) is next_token_loss
    asked: Any = choose_loss(Run.load(overrides=["train.loss_chunk=64"]), nn.Identity())
    assert (asked.func, asked.keywords) == (next_token_loss, {"chunk_rows": 64})


def test_the_balancing_loss_of_experts_is_added_if_the_model_computes_it() -> None:
    asked: Any
    asked, plain = (
        materialize(built("mixtral", f"model.options.output_router_logits={asked}")[0], seed=0)
        for asked in ("true", "false")
    )
    batch = batch_of("mixtral", 0)
    total, count = next_token_loss(asked, batch)
    balance = asked(batch["tokens"]).aux_loss * asked.config.router_aux_loss_coef
    torch.testing.assert_close(total, next_token_loss(plain, batch)[0] + count * balance)
    torch.testing.assert_close(next_token_loss(asked, batch, chunk_rows=5)[0], total)
    own = {"input_ids": batch["tokens"], "labels": batch["tokens"]}
    assert model_computed_loss(asked, own)[0] > model_computed_loss(plain, own)[0]
    with torch.no_grad():  # as in validation, whose loss is that of the labels
        for loss, given in ((next_token_loss, batch), (model_computed_loss, own)):
            torch.testing.assert_close(loss(asked, given), loss(plain, given))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents_whose_positions_begin_again_are_apart_beside_a_mask(name: str, padding: int) -> None:
    model = materialize(built(name)[0], seed=0)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 41, (1, length), generator=generator) for length in (5, 4)]
    alone = [model_computed_loss(model, {"input_ids": one, "labels": one})[0] for one in documents]
    row = torch.cat([*documents, torch.zeros(1, padding, dtype=torch.int64)], dim=1)
    is_token = torch.arange(row.shape[1])[None] < 9
    labels = row.masked_fill(~is_token, -100)
    labels[:, 5] = -100  # the first token of the second document has no token before it
    positions = torch.tensor([[*range(5), *range(4), *range(padding)]])
    packed = {
        "input_ids": row,
        "labels": labels,
        "attention_mask": is_token.long(),
        "position_ids": positions,
    }
    with logged() as messages:
        total, count = model_computed_loss(model, packed)
    assert count.item() == 7
    torch.testing.assert_close(total, sum(alone), rtol=1e-5, atol=1e-5)
    assert all("attention is within these documents" in message for message in messages)


def test_a_row_of_one_document_keeps_its_mask() -> None:
    model = materialize(built("llama")[0], seed=0)
    tokens, mask = torch.arange(3, 11)[None], torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    own = model(**batch, position_ids=positions).loss * 5
    torch.testing.assert_close(model_computed_loss(model, batch | {"position_ids": positions})[0], own)
