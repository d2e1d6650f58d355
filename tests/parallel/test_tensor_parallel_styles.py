"""Modules of any model, divided by a table of styles, compute what they compute whole."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import ShardError
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.training.gradients import sum_gradients_over_tensor_axis
from fullshard.training.shard import shard
from tests.fakes.architectures import whole
from tests.fakes.data import global_batch
from tests.fakes.plans import plan_of

VOCABULARY, LENGTH, WIDTH, HEADS = 13, 8, 16, 4
STYLES = {
    "embedding": "embedding",
    "blocks.0": "cut_input",
    "blocks.*.first_norm": "gather_output",
    "blocks.*": "divide:heads",
    "blocks.*.inputs": "colwise_3",
    "blocks.*.output": "rowwise",
    "blocks.*.feed_forward": "gather_input",
    "blocks.*.feed_forward.0": "colwise",
    "blocks.*.feed_forward.2": "rowwise",
    "norm": "gather_output",
    "head": "head",
}


class Block(nn.Module):
    """One projection to queries, keys and values; a linear of each token that no style names."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.first_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.output(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.feed_forward(self.second_norm(x)) * self.scale(x).sigmoid()


class Model(nn.Module):
    """Tokens (batch, sequence) -> logits, with learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def styled_plan(styles: Mapping[str, str], ranks: int) -> Plan:
    table = "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in styles.items()) + "}"
    sizes = (f"sharding.tensor_parallel={ranks}", f"data.sequence_length={LENGTH}")
    return plan_of(
        dist.get_world_size(), *sizes, f"sharding.tensor_parallel_styles={table}", 'model.python="a:b"'
    )


def build() -> Model:
    with torch.device("meta"):
        return Model()


def outcome(styles: Mapping[str, str]) -> str:
    """Compares loss and gradients with those of the whole model; returns why it is refused."""
    plain, batch = (
        materialize(build(), seed=0),
        global_batch(0, sequences=2, length=LENGTH, vocabulary=VOCABULARY),
    )
    expected, _ = next_token_loss(plain, batch)
    expected.backward()
    try:
        model = shard(build(), styled_plan(styles, dist.get_world_size()))
    except ShardError as error:
        return str(error)
    total, _ = next_token_loss(model, batch)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    total.backward()
    sum_gradients_over_tensor_axis([p.grad for p in model.parameters() if p.grad is not None])
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        gradient = sharded[key].grad
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(whole(gradient), parameter.grad, rtol=1e-4, atol=1e-5, msg=key)
    return "same"


@pytest.mark.parametrize("count", [2, 4])
def test_the_same_loss_and_gradients(count: int, ranks: Any) -> None:
    assert ranks(count).run(outcome, STYLES) == ["same"] * count


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks.*.nothing": "colwise"}, "blocks.*.nothing, which names no module"),
        ({"norm": "colwise"}, "for a LayerNorm"),
        ({"head": "colwise"}, "0 modules of style head"),
        ({"blocks.*.feed_forward.0": "colwise_16"}, "sharding.tensor_parallel = 1"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: dict[str, str], said: str, ranks: Any) -> None:
    assert all(said in message for message in ranks(2).run(outcome, {**STYLES, **change}))
