"""Ranks that share matmuls or sequences: their memory and their bytes, as real ranks have them."""

import pytest
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import PlanError
from fullshard.models.loss import next_token_loss
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.plan import Plan
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step
from tests.fakes.hardware import hardware_of
from tests.planner.dry_step import dry_peak_bytes
from tests.planner.measured import (
    described,
    measured,
    meta_model,
    microbatches,
    model_parallel_bytes,
    plan_of,
    predicted,
)
from tests.planner.test_memory_bound import bound_of

LAYERS, RANKS = 1, 4
TENSOR, CONTEXT = f"sharding.tensor_parallel={RANKS}", f"sharding.context_parallel={RANKS}"


def shared_plan(*overrides: str, length: int = 256, ranks: int = RANKS) -> Plan:
    sizes = [f"data.sequence_length={length}", f"model.max_sequence={length}", f"model.layers={LAYERS}"]
    return plan_of(ranks, *sizes, "model.heads=8", "train.global_batch=8", *overrides)


def sent_bytes(plan: Plan) -> int:
    """Bytes that this rank sends in a step, other than by all-reduces."""
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


# Forward and backward of a block gather twice and reduce twice; gathered inputs are gathered again. Recompute
# repeats both gathers, and the first reduction; the result of the second is not needed.
HIDDEN = {"none": LAYERS * 10 + 4, "full": LAYERS * 11 + 4}


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_sent_bytes_of_shared_matmuls_equal_the_plan(mode: str, ranks) -> None:
    plan = shared_plan(TENSOR, "sharding.strategy=no_shard", f"recompute.mode={mode}", "model.kv_heads=4")
    hidden = 4 * plan.microbatch * plan.run.data.sequence_length * plan.run.decoder_config.d_model
    expected = HIDDEN[mode] * hidden * (RANKS - 1) // RANKS * plan.accumulation
    assert ranks(RANKS).run(sent_bytes, plan) == [expected] * RANKS
    assert model_parallel_bytes(plan) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kv_heads", [2, pytest.param(8, marks=pytest.mark.long)])
def test_sent_bytes_of_shared_sequences_equal_the_plan(kv_heads: int, ranks) -> None:
    plan = shared_plan(CONTEXT, "sharding.strategy=no_shard", f"model.kv_heads={kv_heads}", length=64)
    config = plan.run.decoder_config
    keys = 4 * plan.microbatch * 64 * kv_heads * (config.d_model // config.heads)
    # Keys and values, and their gradients back.
    expected = 4 * keys * (RANKS - 1) // RANKS * LAYERS * plan.accumulation
    assert ranks(RANKS).run(sent_bytes, plan) == [expected] * RANKS
    assert model_parallel_bytes(plan) == pytest.approx(expected, rel=1e-9)


FP8 = ("precision.mode=fp8", "precision.fp8_min_features=16", "model.kv_heads=1")
LONG = [
    (("sharding.tensor_parallel=2", "recompute.mode=selective", "train.loss_chunk=32"), 256),
    (("sharding.tensor_parallel=2", "recompute.mode=full", *FP8), 256),
    ((CONTEXT, "recompute.mode=full"), 512),
]


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ((TENSOR, "recompute.mode=none"), 256),
        ((CONTEXT, "recompute.mode=none"), 512),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
    ids=str,
)
def test_measured_peak_equals_prediction_and_dry_step(overrides: tuple[str, ...], length: int, ranks) -> None:
    plan = shared_plan(*overrides, length=length)
    real = sum(ranks(RANKS).run(measured, plan)[0].values())
    assert dry_peak_bytes(meta_model(plan), plan) == pytest.approx(real, rel=0.005)
    assert predicted(plan).total == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_bounds_hold(mode: str) -> None:
    axes = ("sharding.tensor_parallel=2", f"recompute.mode={mode}")
    sizes = ("train.microbatch=1", "model.layers=8", "model.kv_heads=8", "precision.mode=bf16")
    plan = shared_plan(*axes, *sizes, ranks=8)
    spec = described(plan)
    timer = StepTimePredictor(spec, hardware_of(1, 8))
    seconds = timer.predict_time(plan)
    assert seconds.model_parallel > 0
    least = timer.lower_bound_seconds(timer.sum_phase_ticks(plan), timer.least_stream_ticks(plan))
    assert least <= seconds.total
    assert bound_of(spec, plan) <= peak_bytes(spec, plan).total


def test_spec_of_another_division_is_refused() -> None:
    with pytest.raises(PlanError, match="another division of matmuls"):
        peak_bytes(described(shared_plan("model.kv_heads=8")), shared_plan("sharding.tensor_parallel=2"))
    with pytest.raises(PlanError, match="groups of 3"):
        shared_plan("sharding.tensor_parallel=3")
