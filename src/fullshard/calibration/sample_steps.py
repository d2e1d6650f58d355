"""Measures whole steps of small decoders, which check the measured rates, and the overhead of a step."""

import gc
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fullshard.calibration.collectives import remove_collectives, time_call_on_all_ranks
from fullshard.models.decoder import DecoderModel
from fullshard.sharding.apply import shard
from fullshard.sharding.mesh import RankInfo
from fullshard.spec.calibration import MeasuredStep
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.loss import next_token_loss
from fullshard.training.optimizer import build_optimizer
from fullshard.training.state import TrainState
from fullshard.training.step import run_step

_SIZES = {
    "cpu": {
        "narrow": "d_model=192 layers=5 heads=4 kv_heads=2 d_ff=576 vocabulary=1024",
        "middle": "d_model=448 layers=3 heads=7 kv_heads=7 d_ff=1216 vocabulary=2048",
        "broad": "d_model=640 layers=2 heads=10 kv_heads=5 d_ff=1920 vocabulary=6144",
    },
    "cuda": {
        "narrow": "d_model=512 layers=12 heads=8 kv_heads=4 d_ff=1536 vocabulary=16384",
        "middle": "d_model=1536 layers=10 heads=12 kv_heads=4 d_ff=4096 vocabulary=32768",
        "broad": "d_model=3072 layers=5 heads=24 kv_heads=8 d_ff=8192 vocabulary=65536",
    },
}
# (size, tokens per sequence on the CPU, sequences per microbatch, microbatches per step, other settings)
_SAMPLES: tuple[tuple[str, int, int, int, str], ...] = (
    ("narrow", 64, 1, 1, "sharding.strategy=full_shard"),
    ("narrow", 96, 6, 1, "sharding.strategy=no_shard"),
    ("narrow", 512, 1, 1, "sharding.strategy=shard_grad_op"),
    ("narrow", 96, 4, 1, "sharding.strategy=full_shard recompute.mode=full"),
    ("narrow", 96, 4, 1, "sharding.strategy=full_shard recompute.mode=selective"),
    ("middle", 64, 2, 1, "sharding.strategy=full_shard"),
    ("middle", 64, 1, 3, "sharding.strategy=full_shard"),
    ("middle", 64, 2, 1, "sharding.strategy=no_shard"),
    ("middle", 192, 3, 1, "sharding.strategy=shard_grad_op"),
    ("broad", 64, 1, 1, "sharding.strategy=full_shard"),
    ("broad", 64, 1, 2, "sharding.strategy=zero1"),
    ("broad", 256, 2, 1, "sharding.strategy=full_shard"),
)
# A tiny model whose computing takes almost no time, with the parameters of a few blocks.
_TINY = (
    "model.vocabulary=16 model.d_model=16 model.layers=2 model.heads=2 model.kv_heads=2 model.d_ff=16 "
    "data.sequence_length=4 train.microbatch=1 train.steps=1000000 precision.mode=fp32"
)
_LONGER_ON_GPUS = 8
_LEAST_SECONDS = 1.0  # per sample


def measure_sample_steps(ranks: RankInfo, *, seconds: float) -> tuple[MeasuredStep, ...]:
    """Returns the median seconds of a few steps of each sample, measured in about `seconds`. Collective.

    There are two rounds, so that a temporary slowdown of the machine affects only part of each sample. If
    `seconds` are few, there are fewer samples and one round.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if ranks.device.type == "cuda" else "cpu"
    count = max(1, min(len(_SAMPLES), int(seconds / _LEAST_SECONDS)))
    chosen = [at * len(_SAMPLES) // count for at in range(count)]
    plans = [_build_sample_plan(kind, at, world_size=ranks.world_size) for at in chosen]
    taken: list[list[float]] = [[] for _ in plans]
    for _ in range(2 if count == len(_SAMPLES) else 1):
        for plan, times in zip(plans, taken, strict=True):
            times += _time_steps_of_plan(plan, ranks, seconds=seconds / (2 * len(plans)))
            gc.collect()
            if kind == "cuda":
                torch.cuda.empty_cache()
    measured = zip(plans, taken, strict=True)
    return tuple(MeasuredStep(plan=plan, seconds=statistics.median(times)) for plan, times in measured)


def _build_sample_plan(kind: Literal["cpu", "cuda"], at: int, *, world_size: int) -> Plan:
    size, tokens, microbatch, accumulation, more = _SAMPLES[at]
    overrides = [
        *(f"model.{one}" for one in _SIZES[kind][size].split()),
        "model.max_sequence=8192",
        f"data.sequence_length={tokens * (_LONGER_ON_GPUS if kind == 'cuda' else 1)}",
        f"train.microbatch={microbatch}",
        f"train.global_batch={microbatch * accumulation * world_size}",
        f"precision.mode={'bf16' if kind == 'cuda' else 'fp32'}",
        *more.split(),
    ]
    return Plan.from_run(Run.load(overrides=overrides), world_size=world_size, device=kind)


def _time_steps_of_plan(plan: Plan, ranks: RankInfo, *, seconds: float) -> Sequence[float]:
    """Returns the seconds of each of 2 to 12 steps, as many as fit in `seconds`, as the mean over ranks."""
    state = _build_train_state(plan)
    shape = (plan.microbatch, plan.run.data.sequence_length)
    tokens = torch.randint(0, plan.run.decoder_config.vocabulary, shape, device=ranks.device)
    batch = {"tokens": tokens, "labels": tokens}

    def run_timed_step() -> float:
        started = time.perf_counter()
        batches = [batch] * plan.accumulation
        run_step(state, plan, microbatches=batches, loss=next_token_loss, learning_rate=1e-4)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return time.perf_counter() - started

    begun = time.perf_counter()
    run_timed_step()  # allocates memory that later steps reuse
    second = run_timed_step()
    left = torch.tensor([seconds - (time.perf_counter() - begun), second], dtype=torch.float64)
    dist.all_reduce(left)
    count = max(2, min(12, int(left[0] / left[1])))
    times = torch.tensor([run_timed_step() for _ in range(count)], dtype=torch.float64)
    dist.all_reduce(times)
    return (times / ranks.world_size).tolist()


def measure_step_overhead(mesh: DeviceMesh, *, seconds: float) -> float:
    """Returns the seconds of a step of `train` besides forward and backward, on a tiny model. Collective.

    They include the collectives of the norm and of the loss, and the update of a few parameters.
    """
    run = Run.load(overrides=[*_TINY.split(), f"train.global_batch={mesh.size()}"])
    plan = Plan.from_run(run, world_size=mesh.size(), device="cuda" if mesh.device_type == "cuda" else "cpu")
    zeros = torch.zeros(1, run.data.sequence_length, dtype=torch.long, device=mesh.device_type)
    here = {"tokens": zeros, "labels": zeros}
    # A source of microbatches (`data.MicrobatchSource`) without any cost.
    state = _build_train_state(plan, data=SimpleNamespace(microbatches=lambda step, rank, plan: iter([here])))
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            remove_collectives(module)
    steps = train(state, plan)
    whole = time_call_on_all_ranks(lambda: next(steps), mesh=mesh, seconds=seconds / 2)

    def run_forward_and_backward() -> None:
        total, _ = next_token_loss(state.model, here)
        total.backward()

    bare = time_call_on_all_ranks(run_forward_and_backward, mesh=mesh, seconds=seconds / 2)
    return max(whole - bare, 0.0)


def _build_train_state(plan: Plan, *, data: object = None) -> TrainState:
    with torch.device("meta"):
        model = DecoderModel(plan.run.decoder_config)
    return TrainState(shard(model, plan), build_optimizer(model, plan), data=data)
