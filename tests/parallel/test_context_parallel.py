"""Attention of a rank's part of each sequence is that part of attention over whole sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import SequencePart, cut_sequences
from fullshard.errors import ShardError, SpecError, TrainError
from fullshard.models.build import build_model
from fullshard.models.document_attention import (
    QueryKeyValue,
    attend_with_varlen_kernel,
    attend_within_documents,
)
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.parallel.mesh import build_axis_group
from fullshard.parallel.model_parallel import use_context_parallel
from fullshard.spec.run import Run
from tests.fakes.architectures_hf import CONFIGS, LENGTH, batch_of, write_config
from tests.fakes.families import STATE_SPACE
from tests.fakes.plans import plan_of
from tests.models.test_architectures_hf import built
from tests.models.test_document_attention import bounds_of, heads_of, masked, with_gradients
from tests.training.test_families import built as built_family

REFUSED = {"bloom": "replace", "falcon": "replace", "gemma2": "caps the logits"}
CAUSAL = [name for name in CONFIGS if "tokens" in batch_of(name, 0) and name not in REFUSED]


def part_of(inputs: QueryKeyValue, begins: Sequence[int], each: int) -> QueryKeyValue:
    pieces = [inputs.query[:, :, begin : begin + each] for begin in begins]
    return inputs._replace(query=torch.cat(pieces, dim=2))


def varlen_by_mask(
    query: Tensor, key: Tensor, value: Tensor, *places: Any, scale: float | None, window_size: Any
) -> Tensor:
    """Computes as torch's kernel does: the last query of each sequence is aligned with its last key."""
    ends_of_queries, ends_of_keys, _, _ = places
    groups = query.shape[1] // key.shape[1]
    result = torch.zeros_like(query)
    for i in range(len(ends_of_queries) - 1):
        own = slice(int(ends_of_queries[i]), int(ends_of_queries[i + 1]))
        seen = slice(int(ends_of_keys[i]), int(ends_of_keys[i + 1]))
        queries, keys = own.stop - own.start, seen.stop - seen.start
        if queries:
            near = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            if window_size[0] >= 0:
                near = near.triu(keys - queries - window_size[0])
            k, v = (one[seen].repeat_interleave(groups, dim=1).transpose(0, 1) for one in (key, value))
            y = torch.nn.functional.scaled_dot_product_attention(
                query[own].transpose(0, 1), k, v, attn_mask=near, scale=scale
            )
            result[own] = y.transpose(0, 1)
    return result


@pytest.mark.parametrize("kernel", ["cpu", "varlen"])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_queries(
    ranks: int, window: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = heads_of(2, torch.float64)
    expected = masked(inputs, window=window)
    parts = [SequencePart(ranks, rank) for rank in range(ranks)]
    length = inputs.query.shape[2]
    if kernel == "varlen":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_mask)
    gradients = [torch.zeros_like(one) for one in inputs]
    weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected).cos()
    for part in parts:
        begins = part.piece_starts(length)
        own = part_of(inputs, begins, length // ranks // 2)
        if kernel == "cpu":
            y = attend_within_documents(own, bounds_of(), window=window, begins=begins)
        else:
            y = attend_with_varlen_kernel(own, bounds_of(), scale=None, window=window, begins=begins)
        torch.testing.assert_close(y, part.cut(expected), rtol=1e-12, atol=1e-12)
        for total, one in zip(
            gradients, torch.autograd.grad((y * part.cut(weights)).sum(), inputs), strict=True
        ):
            total += one
    for total, one in zip(gradients, with_gradients(expected, inputs)[1:], strict=True):
        torch.testing.assert_close(total, one, rtol=1e-12, atol=1e-12)


def losses_and_gradients(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    total, _ = next_token_loss(model, batch)
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_parts_add_up(name: str, documents: bool) -> None:
    """The ranks' losses and gradients, each of its part of the sequences, add up to those of whole ones."""
    plan = plan_of(
        dist.get_world_size(),
        f"sharding.context_parallel={dist.get_world_size()}",
        f"data.sequence_length={LENGTH}",
    )
    batch = batch_of(name, 0)
    if documents:
        batch |= {"documents": torch.tensor([[0] * 5 + [1] * (LENGTH - 5), [0] * LENGTH])}
    plain = materialize(built(name)[0], seed=0)
    expected, wanted = losses_and_gradients(plain, batch)
    model = materialize(built(name)[0], seed=0)
    use_context_parallel(
        model, plan, rank=dist.get_rank(), group=build_axis_group(plan, "context").group_name
    )
    seen, found = losses_and_gradients(model, cut_sequences(batch, plan))
    dist.all_reduce(seen)
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    for key, gradient in wanted.items():
        own = found.get(key, torch.zeros_like(gradient))
        dist.all_reduce(own)
        torch.testing.assert_close(
            own, gradient, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", CAUSAL)
def test_parts_of_models_of_transformers_add_up(name: str, ranks: Any) -> None:
    ranks(2).run(check_parts_add_up, name, True)
    ranks(2).run(check_parts_add_up, name, False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_attention_cannot_reach_other_ranks_is_refused(name: str) -> None:
    with pytest.raises(ShardError, match="cannot be divided") as error:
        use_context_parallel(built(name)[0], plan_of(2, "sharding.context_parallel=2"), rank=0)
    assert REFUSED[name] in str(error.value.why)


@pytest.mark.parametrize("name", STATE_SPACE)
def test_a_model_that_reads_tokens_in_order_is_refused(name: str) -> None:
    with pytest.raises(ShardError, match="cannot be divided over ranks"):
        use_context_parallel(built_family(name)[0], plan_of(2, "sharding.context_parallel=2"), rank=0)


def test_document_mask_with_a_balance_loss_is_refused(tmp_path: Path) -> None:
    write_config("qwen3_moe", tmp_path)
    settings = [f"model.hf={tmp_path}", "model.options={output_router_logits = true}"]
    build_model(Run.load(overrides=settings))
    with pytest.raises(SpecError, match="mask of documents for one of padding"):
        build_model(Run.load(overrides=[*settings, "data.document_mask=true"]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_refusal_of_a_balance_loss_or_of_eager_attention_says_what_to_set(attention: str) -> None:
    model: Any = built("mixtral" if attention == "sdpa" else "llama")[0]
    model.config._attn_implementation = attention
    model.config.output_router_logits = attention == "sdpa"
    says = 'attention = "sdpa"' if attention == "eager" else "output_router_logits = false"
    with pytest.raises(ShardError, match=says):
        use_context_parallel(model, plan_of(2, "sharding.context_parallel=2"), rank=0)


def test_labels_are_cut_after_the_shift() -> None:
    """The last token of a piece predicts the first of the next piece, which another rank has."""
    tokens = torch.arange(25)[None]
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": tokens[:, :-1] * 2}
    for rank in range(3):
        own = SequencePart(3, rank).cut_batch(batch)
        assert torch.equal(own["weights"], own["tokens"] * 2)
        assert torch.equal(own["labels"], own["tokens"] + 1)
        assert torch.equal(own["positions"], own["tokens"])


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 8), {"tokens": torch.zeros(2, 8)}, {"images": torch.zeros(2, 8), "labels": 0}]
)
def test_batches_that_are_not_of_tokens_are_refused(batch: Any) -> None:
    with pytest.raises(TrainError, match="only batches of tokens and labels"):
        SequencePart(2, 0).cut_batch(batch)


def test_indivisible_length_is_refused_with_the_nearest() -> None:
    batch = {"tokens": torch.zeros(1, 10), "labels": torch.zeros(1, 10)}
    with pytest.raises(TrainError, match="4 equal pieces") as error:
        SequencePart(2, 0).cut_batch(batch)
    assert "8 or 12" in str(error.value.fix)
