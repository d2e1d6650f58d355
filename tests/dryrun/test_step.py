"""A dry run finds what real ranks hold, byte by byte, at any number of ranks."""

from math import ceil

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.dryrun.step import run_dry_step
from fullshard.dryrun.values import DryRunMemory
from fullshard.errors import ShardError
from fullshard.planner.memory import peak_bytes
from fullshard.spec.measurement import MemoryParts
from fullshard.spec.plan import Plan
from fullshard.tracing.describe import describe
from fullshard.training.loss import next_token_loss
from fullshard.training.optimizer import build_optimizer
from tests.fakes.architectures_hf import write_config
from tests.planner.measured import measured, meta_model, plan_of

HYBRID = ["sharding.strategy=hybrid_shard", "sharding.shard_degree=8"]
UNEVEN = ["model.vocabulary=1021", "model.d_ff=383", "model.d_model=120"]
pytestmark = pytest.mark.filterwarnings("ignore::fullshard.sharding.unit_sizes.UnitSizeWarning")


def dry(plan: Plan, *, rank: int = 0) -> DryRunMemory:
    return run_dry_step(meta_model(plan), plan, loss=next_token_loss, optimizer=build_optimizer, rank=rank)


@pytest.fixture(scope="module")
def of_two() -> DryRunMemory:
    return dry(plan_of(2))


@pytest.mark.parametrize(
    ("n", "accumulation", "overrides"),
    [
        pytest.param(2, 3, ["sharding.strategy=zero1", "recompute.mode=full"], marks=pytest.mark.long),
        pytest.param(
            4,
            1,
            ["sharding.strategy=full_shard", "sharding.reshard_after_forward=2", "precision.mode=bf16_pure"],
            marks=pytest.mark.long,
        ),
        (2, 1, ["recompute.mode=offload"]),
        pytest.param(4, 1, ["sharding.tensor_parallel=2", "train.loss_chunk=32"], marks=pytest.mark.long),
        (2, 1, ["model.hf=llama"]),
        pytest.param(2, 1, ["model.hf=llama", "sharding.tensor_parallel=2"], marks=pytest.mark.long),
    ],
)
def test_each_part_of_the_peak_is_what_real_ranks_hold(ranks, tmp_path, n, accumulation, overrides):
    write_config("llama", tmp_path)
    overrides = [one.replace("model.hf=llama", f"model.hf={tmp_path}") for one in overrides]
    plan = plan_of(n, *overrides, accumulation=accumulation)
    real, found = ranks(n).run(measured, plan)[0], dry(plan)
    assert found.peak_bytes == pytest.approx(sum(real.values()), rel=0.001)
    rest = real.pop("rest")
    assert found.parts() == {**real, "rest": pytest.approx(rest, rel=0.001)}


def test_each_of_uneven_ranks_holds_what_the_real_one_does(ranks):
    plan = plan_of(3, *UNEVEN)
    real = [sum(parts.values()) for parts in ranks(3).run(measured, plan)]
    assert [dry(plan, rank=rank).peak_bytes for rank in (0, 2)] == pytest.approx(real[::2], rel=0.001)


@pytest.mark.parametrize("n", [pytest.param(64, marks=pytest.mark.long), 1024])
def test_shards_are_the_first_chunk_of_dim_0(n):
    """And AdamW's state twice that, with a step count of 4 bytes for each parameter."""
    plan = plan_of(n, *UNEVEN)
    shapes = [parameter.shape for parameter in meta_model(plan).parameters()]
    shards = sum(4 * ceil(shape[0] / n) * shape[1:].numel() for shape in shapes)
    found = dry(plan)
    assert found.parameter_shards == shards
    assert found.optimizer_state == 2 * shards + 4 * len(shapes)
    # The optimizer steps in place, on these and the gradients.
    assert found.optimizer_step_bytes - found.buffers == pytest.approx(4 * shards, rel=0.1)


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        pytest.param(
            "cpu",
            ["prefetch.mode=explicit", "prefetch.forward=2", "prefetch.backward=2"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "cpu",
            ["recompute.mode=full", "sharding.reshard_after_forward=8", "sharding.strategy=full_shard"],
            marks=pytest.mark.long,
        ),
        pytest.param("cuda", [*HYBRID, "precision.mode=bf16"], marks=pytest.mark.long),
        pytest.param(
            "cuda",
            ["sharding.strategy=zero1", "recompute.mode=selective", "precision.mode=bf16"],
            marks=pytest.mark.long,
        ),
        ("cuda", ["sharding.strategy=full_shard", "recompute.mode=offload", "precision.mode=bf16"]),
    ],
    ids=["prefetch", "hpz", "hybrid", "zero1", "offload"],
)
def test_the_closed_form_tells_the_same_at_64_ranks(device, overrides):
    plan = plan_of(64, *overrides).model_copy(update={"device": device})
    told = peak_bytes(describe(meta_model(plan), plan, loss=next_token_loss), plan)
    assert told.total == pytest.approx(dry(plan).peak_bytes, rel=0.005)


def test_on_cuda_the_allocator_holds_at_least_what_tensors_take(of_two: DryRunMemory):
    found = dry(plan_of(8, "precision.mode=bf16").model_copy(update={"device": "cuda"}))
    assert found.reserved_bytes >= found.allocated_bytes >= found.peak_bytes
    # Blocks are rounded to 512 bytes: little, over some hundred tensors.
    assert found.allocated_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    assert of_two.reserved_bytes == 0


@pytest.mark.long
def test_more_microbatches_hold_no_more_where_each_is_reduced():
    """From the second on, the gradient shards of those before are there: more than that would be a leak."""
    two, three = (
        dry(plan_of(2, "train.gradient_sync=every_microbatch", accumulation=accumulation))
        for accumulation in (2, 3)
    )
    assert two.peak_bytes == three.peak_bytes


@pytest.mark.usefixtures("of_two")
def test_it_leaves_no_process_group_and_uses_none():
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ShardError, match="process of its own"):
            dry(plan_of(2))
    finally:
        dist.destroy_process_group()


def chosen_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return logits[logits > 0].mean()


def test_what_depends_on_values_is_refused():
    plan = plan_of(2)
    with pytest.raises(ShardError, match="cannot be run dry") as refused:
        run_dry_step(meta_model(plan), plan, loss=chosen_loss, optimizer=build_optimizer)
    assert "no values" in str(refused.value)
    assert not dist.is_initialized()


def test_parts_are_the_meters_and_sum_to_the_peak(of_two: DryRunMemory):
    assert of_two.peak_bytes == sum(of_two.parts().values())
    assert list(of_two.parts()) == list(MemoryParts.model_fields)
