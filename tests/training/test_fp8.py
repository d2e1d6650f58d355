"""Runs in fp8, emulated on a CPU: against torchao's own modules, and against bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fullshard.checkpoint import load, save
from fullshard.distributed.collectives import DirectAllGather
from fullshard.errors import ShardError, SpecError
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.parallel.fp8 import choose_fp8_linears, find_weight_scales
from fullshard.parallel.materialize import materialize
from fullshard.parallel.units import find_recompute_and_compile_blocks, find_units
from fullshard.spec.model import fp8_summary_text
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.dotted import import_quietly
from fullshard.torch_private.groups import count_issued_collectives
from fullshard.training.evaluate import mean_loss
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.training.runs import local_bits, same_bits, whole
from tests.training.test_precision import Progressions, make_run, progressions

pytest.importorskip("torchao")

ALL = "precision.fp8_min_features=16"
FULL, HYBRID = (
    ("sharding.strategy=full_shard",),
    ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
)


def fp8_run(mode: str, *overrides: str) -> Run:
    return make_run(mode, (ALL, *overrides))


def meta_model(run: Run) -> nn.Module:
    with torch.device("meta"):
        return DecoderModel(run.decoder_config)


def state_of(run: Run) -> tuple[TrainState, Plan]:
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(meta_model(run), plan)
    return TrainState(model, build_optimizer(model, plan), data=Progressions()), plan


def losses_to(state: TrainState, plan: Plan, until: int) -> list[float]:
    losses: list[float] = []
    steps = train(state, plan)
    while state.step < until:
        losses.append(next(steps).loss)
    return losses


# Numbers #
def gradients_of(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    loss, count = next_token_loss(model, progressions(dist.get_rank()))
    (loss / count).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return loss.item(), gradients


def gradients_here(run: Run) -> tuple[float, dict[str, Tensor]]:
    return gradients_of(shard(meta_model(run), Plan.from_run(run, world_size=dist.get_world_size())))


def gradients_by_torchao(run: Run, gathers_fp8: bool) -> tuple[float, dict[str, Tensor]]:
    """torchao's modules and weights, under `fully_shard`, by hand."""
    float8 = import_quietly("torchao.float8")
    model = materialize(meta_model(run), seed=run.run.seed)
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise" if gathers_fp8 else "rowwise")
    settings = {**vars(recipe), "emulate": True, "enable_fsdp_float8_all_gather": gathers_fp8}
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(**settings),
        module_filter_fn=lambda _, name: name.startswith("blocks."),
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard([model.norm, model.head], mp_policy=policy)
    fully_shard(model.embedding, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return gradients_of(model)


@pytest.mark.parametrize("mode", ["fp8", "fp8_rowwise"])
def test_fp8_gradients_equal_those_of_torchao(mode: str, ranks: Any) -> None:
    run = fp8_run(mode, *FULL, "model.d_ff=112", "train.global_batch=24")
    ours = ranks(2).run(gradients_here, run)
    theirs = ranks(2).run(gradients_by_torchao, run, mode == "fp8")
    for (loss, gradients), (loss_, gradients_) in zip(ours, theirs, strict=True):
        assert loss == loss_
        assert gradients.keys() == gradients_.keys()
        assert all(torch.equal(gradients[name], gradients_[name]) for name in gradients)


def curve_and_validation(run: Run) -> tuple[list[float], float]:
    state, plan = state_of(run)
    losses = losses_to(state, plan, plan.run.train.steps)
    held_out = [
        next(Progressions().microbatches(10_000 + i, rank=dist.get_rank(), plan=plan)) for i in range(4)
    ]
    return losses, mean_loss(state.model, held_out, loss=next_token_loss)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("fp8", (*HYBRID, "recompute.mode=selective", "train.microbatch=3")),
        ("fp8_rowwise", FULL),
        pytest.param("fp8_rowwise", (*FULL, "offload.tier=optimizer:cpu"), marks=pytest.mark.long),
    ],
)
def test_loss_is_that_of_bf16(mode: str, settings: tuple[str, ...], ranks: Any) -> None:
    fp8 = ranks(4).run(curve_and_validation, fp8_run(mode, *settings))
    bf16 = ranks(4).run(curve_and_validation, make_run("bf16", settings))
    assert len({loss for _, loss in fp8}) == 1
    assert fp8[0][0] != bf16[0][0]  # it is not bf16
    assert fp8[0][1] == pytest.approx(bf16[0][1], rel=0.01)


def losses_here(run: Run) -> list[float]:
    state, plan = state_of(run)
    return losses_to(state, plan, 8)


@pytest.mark.parametrize(
    ("mode", "count", "tensor"),
    [
        ("fp8", 2, 2),
        pytest.param("fp8_rowwise", 4, 4, marks=pytest.mark.long),
    ],
)
def test_divided_matmuls_train_to_the_same_loss(mode: str, count: int, tensor: int, ranks: Any) -> None:
    """Ranks use parts of one whole weight for keys and values: there are fewer heads than ranks."""
    settings = (*FULL, "model.kv_heads=1")
    whole_matmuls = ranks(1).run(losses_here, fp8_run(mode, *settings))[0]
    divided = ranks(count).run(losses_here, fp8_run(mode, *settings, f"sharding.tensor_parallel={tensor}"))[0]
    assert divided == pytest.approx(whole_matmuls, rel=0.01)
    assert divided != whole_matmuls


# Checkpoints #
def part(run: Run, directory: Path, until: int) -> tuple[list[float], dict[str, Tensor], bool]:
    """Resumes from the newest checkpoint, trains to step `until` and saves."""
    state, plan = state_of(run)
    load(state, directory, missing_ok=True)
    losses = losses_to(state, plan, until)
    save(state, directory, plan=plan)
    plain = all(type(one) is Tensor and one.dtype == torch.float32 for one in local_bits(state).values())
    return losses, whole(state.model), plain


@pytest.mark.parametrize("settings", [(), ("sharding.tensor_parallel=2",)])
def test_resumed_run_has_the_same_bits(settings: tuple[str, ...], ranks: Any, tmp_path: Path) -> None:
    run = fp8_run("fp8", *FULL, *settings)
    ((through, weights, _), *_) = ranks(2).run(part, run, tmp_path / "whole", 6)
    parts = [ranks(2).run(part, run, tmp_path / "parts", until)[0] for until in (3, 6)]
    assert [loss for losses, *_ in parts for loss in losses] == through
    assert same_bits(parts[-1][1], weights)
    assert all(plain for *_, plain in parts)


def test_a_checkpoint_in_fp8_resumes_on_other_ranks_and_in_bf16(ranks: Any, tmp_path: Path) -> None:
    """The next loss is the one of the same weights on as many ranks as before, in the same precision."""
    run = fp8_run("fp8", *FULL)
    ((_, saved, _), *_) = ranks(2).run(part, run, tmp_path, 3)
    ((three, *_), *_) = ranks(3).run(part, run, tmp_path, 5)
    ((two, *_), *_) = ranks(2).run(part, run, tmp_path / "again", 5)
    assert three == pytest.approx(two[3:], rel=1e-3)
    ((bf16, begun, _), *_) = ranks(2).run(part, make_run("bf16", FULL), tmp_path, 6)
    assert bf16
    assert begun.keys() == saved.keys()


# Communication #
class CountingAllGather(DirectAllGather):
    """Counts the bytes that a rank sends to each other rank."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.sent.append(input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def traffic(run: Run) -> tuple[int, int, int]:
    """Bytes sent in all-gathers of blocks, their number of all-gathers, and collectives of a step."""
    state, plan = state_of(run)
    counter = CountingAllGather()
    for block in state.model.blocks:
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(counter)
    steps = train(state, plan)
    next(steps)
    counter.sent.clear()
    before = count_issued_collectives(torch.device("cpu"))
    next(steps)
    return sum(counter.sent), len(counter.sent), count_issued_collectives(torch.device("cpu")) - before


def test_matrices_are_sent_in_half_the_bytes_and_scales_in_one_reduction(ranks: Any) -> None:
    settings = (*FULL, "train.microbatch=4")  # three microbatches a step
    (fp8, gathers, reduced), *_ = ranks(2).run(traffic, fp8_run("fp8", *settings))
    (bf16, gathers_, reduced_), *_ = ranks(2).run(traffic, make_run("bf16", settings))
    (rowwise, *_), *_ = ranks(2).run(traffic, fp8_run("fp8_rowwise", *settings))
    model = meta_model(make_run("bf16"))
    vectors = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 1)
    matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    assert gathers == gathers_ > 0
    assert bf16 == rowwise == gathers * (2 * matrices + 2 * vectors) // 2
    assert fp8 == gathers * (matrices + 2 * vectors) // 2
    assert reduced == reduced_ + 1


# Choice #
def summary(model: nn.Module, *overrides: str, mode: str = "fp8") -> tuple[set[str], str]:
    plan = Plan.from_run(make_run(mode, overrides), world_size=2)
    section = plan.run.sharding.units
    units = find_units(model, section)
    blocks = find_recompute_and_compile_blocks(model, units=units)
    divided = {"blocks.0.attention.output.weight": 1}
    chosen = choose_fp8_linears(model, units, plan=plan, blocks=blocks, divided=divided)
    assert chosen is not None
    return set(chosen.linears), fp8_summary_text(chosen.shares)


def test_linear_modules_of_the_blocks_are_chosen() -> None:
    run = make_run("fp8", ("model.d_model=64", "model.d_ff=128"))
    chosen, text = summary(meta_model(run), ALL)
    assert len(chosen) == 2 * 7
    assert all(name.startswith("blocks.") for name in chosen)
    assert text == "14 of 16 matrices (95 % of their 77.8k elements); in bf16: 2 outside of the blocks"


def test_small_frozen_and_odd_matrices_and_other_units_stay_in_bf16() -> None:
    model = meta_model(make_run("fp8", ("model.d_ff=100", "model.layers=3")))
    model.blocks[0].attention.query.weight.requires_grad_(False)
    override = 'sharding.units.overrides=[{match="blocks.2", precision="bf16"}]'
    chosen, text = summary(model, ALL, override)
    kept = ("query", "key", "value", "output")
    names = {f"blocks.{i}.attention.{one}" for i in (0, 1) for one in kept} - {"blocks.0.attention.query"}
    assert chosen == names
    for count, reason in (
        (6, "with features that 16 does not divide"),
        (1, "frozen"),
        (7, "in units in bf16"),
    ):
        assert f"{count} {reason}" in text
    with pytest.raises(ShardError, match="no matrix to multiply in fp8.*\n.*with under 2,048 features"):
        summary(model)


def test_matrices_are_chosen_by_the_part_that_a_rank_multiplies() -> None:
    """Rows are divided, or a rank uses a part of them; of one output matrix, columns are."""
    model = meta_model(
        make_run(
            "fp8",
            ("model.d_model=80", "model.heads=5", "model.kv_heads=5", "model.d_ff=128", "model.layers=2"),
        )
    )
    chosen, text = summary(model, ALL, "sharding.tensor_parallel=2")
    rows = {f"blocks.{i}.feed_forward.{one}" for i in (0, 1) for one in ("gate", "up")}
    assert chosen == rows
    assert "10 with features that 16 does not divide per rank" in text


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.fused = nn.Parameter(torch.empty(3, 16, 16))


def test_experts_stay_in_bf16() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(MixtureBlock() for _ in range(2)))
    chosen, text = summary(model, ALL)
    assert chosen == {"0.shared", "1.shared"}
    assert "6 of experts, 2 of other modules" in text or "2 of other modules, 6 of experts" in text


def test_gathering_in_fp8_is_refused_with_an_offload_target() -> None:
    setting = "offload.tier=optimizer:cpu"
    with pytest.raises(SpecError, match='precision.mode = "fp8" does not go with .*"fp8_rowwise" does'):
        fp8_run("fp8", *FULL, setting)
    fp8_run("fp8_rowwise", *FULL, setting)


def scales_in_a_users_loop(run: Run) -> bool:
    """After an update outside of our loop, the next forward has the scales of the new weights."""
    state, _ = state_of(run)
    scales = find_weight_scales(state.model)
    assert scales is not None
    seen: list[Tensor] = []
    for _ in range(2):
        next_token_loss(state.model, progressions(0))[0].backward()
        seen.append(torch.stack(list(scales._scales.values())))
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.to_local().data.mul_(2.0)
    return torch.equal(seen[0], 2 * seen[1])


def test_scales_follow_weights_that_anything_changes(ranks: Any) -> None:
    assert ranks(2).run(scales_in_a_users_loop, fp8_run("fp8", *FULL)) == [True, True]
