"""torch.compile per block: the same numbers, the same names. Slow: the compiler starts anew on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.errors import ShardError
from fullshard.sharding.apply import shard
from tests.fakes.architectures import loss_of, on_meta, tokens_of, whole
from tests.fakes.plans import plan_of

Results = tuple[list[str], list[float], dict[str, Tensor], int]


def train(name: str, *settings: str) -> Results:
    """Names in the state dict, losses, gradients, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = shard(on_meta(name), plan_of(2, *settings))
    losses = []
    for step in range(2):
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        losses.append(loss.item())
    gradients = {key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return list(model.state_dict()), losses, gradients, graphs


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("decoder", "none"),
        ("decoder", "full"),
        ("decoder", "selective"),
        ("decoder", "offload"),
        ("fused_experts", "none"),  # which gather in the middle of the block
        ("fused_experts", "full"),
        ("fused_experts", "offload"),
    ],
)
def test_compiled_blocks_compute_what_eager_ones_do(
    name: str, recompute: str, ranks: Callable[..., Any]
) -> None:
    settings = (f"recompute.mode={recompute}",)
    eager = ranks(2, timeout_seconds=400).run(train, name, *settings)
    compiled = ranks(2, timeout_seconds=400).run(train, name, *settings, "run.compile=true")
    for (names, losses, gradients, none), (names_, losses_, gradients_, graphs) in zip(
        eager, compiled, strict=True
    ):
        assert none == 0
        assert graphs > 0
        assert names_ == names
        assert not any("_orig_mod" in one for one in names_)
        assert losses_ == pytest.approx(losses, rel=1e-5)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradients_[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


def test_selective_recompute_of_a_compiled_block_that_gathers_is_refused(ranks: Callable[..., Any]) -> None:
    with pytest.raises(ShardError, match="MixtureBlock cannot be compiled with selective recompute"):
        ranks(2).run(train, "fused_experts", "recompute.mode=selective", "run.compile=true")
