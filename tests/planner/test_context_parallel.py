"""The context-parallel axis: its memory and its bytes, as real ranks have them."""

import pytest
import torch.distributed as dist
from torch import Tensor

from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step
from tests.planner.dry_step import dry_peak_bytes
from tests.planner.measured import (
    measured,
    meta_model,
    microbatches,
    model_parallel_bytes,
    plan_of,
    predicted,
)

LAYERS, RANKS = 2, 4


def context_plan(*overrides: str, context: int = RANKS, length: int = 64) -> Plan:
    sizes = [
        f"sharding.context_parallel={context}",
        f"data.sequence_length={length}",
        f"model.max_sequence={length}",
        "model.heads=8",
    ]
    sizes.append(f"model.layers={LAYERS}")
    return plan_of(RANKS, *sizes, "train.global_batch=8", *overrides)


def sent_bytes(plan: Plan) -> int:
    """On a rank: the bytes that it sends in a step, other than by all-reduces."""
    model = shard(meta_model(plan), plan)
    state, sent, send = TrainState(model, build_optimizer(model, plan)), 0, dist.isend

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> dist.Work | None:
        nonlocal sent
        sent += tensor.nbytes
        return send(tensor, *args, **kwargs)

    dist.isend = counted
    try:
        run_step(state, plan, microbatches=microbatches(plan), loss=next_token_loss)
    finally:
        dist.isend = send
    return sent


def keys_bytes(plan: Plan, *, heads: int) -> int:
    """Bytes of a microbatch's keys of whole sequences with this many heads, in fp32."""
    config = plan.run.decoder_config
    return 4 * plan.microbatch * plan.run.data.sequence_length * heads * (config.d_model // config.heads)


@pytest.mark.parametrize("kv_heads", [2, pytest.param(8, marks=pytest.mark.long)])
def test_sent_bytes_equal_the_plan(kv_heads: int, ranks) -> None:
    plan = context_plan("sharding.strategy=no_shard", f"model.kv_heads={kv_heads}")
    tensors = 4 * keys_bytes(plan, heads=kv_heads)  # keys and values, and their gradients back
    expected = tensors * (RANKS - 1) // RANKS * LAYERS * plan.accumulation
    assert ranks(RANKS).run(sent_bytes, plan) == [expected] * RANKS
    assert model_parallel_bytes(plan) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_peak_equals_plan_and_dry_step(recompute: str, ranks) -> None:
    plan = context_plan(f"recompute.mode={recompute}", length=512)
    real = sum(ranks(RANKS).run(measured, plan)[0].values())
    assert dry_peak_bytes(meta_model(plan), plan) == pytest.approx(real, rel=0.002)
    assert predicted(plan).total == pytest.approx(real, rel=0.01)
