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
from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.models.decoder import DecoderModel
from fullshard.sharding.mesh import RankInfo
from fullshard.spec.calibration import MeasuredStep
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.loss import choose_loss, next_token_loss
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step

_SIZES = {
    "cpu": {
        "narrow": "d_model=192 layers=5 heads=4 kv_heads=2 d_ff=576 vocabulary=1024",
        "middle": "d_model=448 layers=3 heads=7 kv_heads=7 d_ff=1216 vocabulary=2048",
        "broad": "d_model=640 layers=2 heads=10 kv_heads=5 d_ff=1920 vocabulary=6144",
        "long": "d_model=128 layers=6 heads=4 kv_heads=4 d_ff=384 vocabulary=1024",
    },
    "cuda": {
        "narrow": "d_model=512 layers=12 heads=8 kv_heads=4 d_ff=1536 vocabulary=16384",
        "middle": "d_model=1536 layers=10 heads=12 kv_heads=4 d_ff=4096 vocabulary=32768",
        "broad": "d_model=3072 layers=5 heads=24 kv_heads=8 d_ff=8192 vocabulary=65536",
        "long": "d_model=64 layers=12 heads=4 kv_heads=4 d_ff=128 vocabulary=64",
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
    ("narrow", 96, 4, 1, "sharding.strategy=full_shard precision.mode=bf16"),
    ("middle", 64, 2, 1, "sharding.strategy=no_shard precision.mode=bf16"),
    # Most of their time is the host's.
    ("long", 32, 1, 1, "sharding.strategy=no_shard"),
    ("long", 32, 1, 1, "sharding.strategy=no_shard recompute.mode=full"),
    ("long", 32, 1, 1, "sharding.strategy=no_shard recompute.mode=selective"),
)
# Steps of ranks that share work, two by two.
_EXPERTS = "model.experts=8 sharding.expert_parallel=2"
_MIXTURE = f"{_EXPERTS} model.expert_d_ff=128"
_LARGER_MIXTURE = f"{_EXPERTS} model.expert_d_ff=448"
_SHARED_SAMPLES: tuple[tuple[str, int, int, int, str], ...] = (
    ("long", 64, 1, 1, "sharding.strategy=no_shard sharding.tensor_parallel=2"),
    (
        *("narrow", 128, 4, 1),
        "sharding.strategy=full_shard sharding.context_parallel=2 sharding.context_method=ulysses "
        "precision.mode=bf16",
    ),
    ("narrow", 64, 4, 1, "sharding.strategy=zero1 sharding.context_parallel=2 recompute.mode=full"),
    ("narrow", 128, 2, 1, f"sharding.strategy=zero1 {_MIXTURE}"),
    (
        *("narrow", 64, 4, 1),
        f"sharding.strategy=full_shard sharding.tensor_parallel=2 {_MIXTURE} recompute.mode=selective "
        "precision.mode=bf16",
    ),
    (
        *("narrow", 64, 2, 2),
        f"sharding.strategy=full_shard {_MIXTURE} model.shared_experts=1 recompute.mode=full "
        "precision.mode=bf16 train.loss_chunk=16",
    ),
    (
        *("long", 64, 2, 2),
        f"sharding.strategy=zero1 sharding.context_parallel=2 {_MIXTURE} model.shared_experts=1 "
        "recompute.mode=every train.loss_chunk=16",
    ),
    ("long", 32, 5, 1, f"sharding.strategy=full_shard {_MIXTURE} precision.mode=bf16_reduce"),
    (
        *("middle", 64, 2, 2),
        f"sharding.strategy=zero1 sharding.context_parallel=2 {_LARGER_MIXTURE} recompute.mode=full",
    ),
    (
        *("middle", 128, 3, 2),
        f"sharding.strategy=no_shard {_LARGER_MIXTURE} model.shared_experts=1 precision.mode=bf16_reduce",
    ),
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

    There are two rounds, and the faster one counts, since other load on the machine lasts for seconds. If
    `seconds` are few, there are fewer samples and one round.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if ranks.device.type == "cuda" else "cpu"
    samples = _SAMPLES if ranks.local_world_size % 2 else (*_SAMPLES, *_SHARED_SAMPLES)
    count = max(1, min(len(samples), int(seconds / _LEAST_SECONDS)))
    chosen = [samples[at * len(samples) // count] for at in range(count)]
    plans = [_build_sample_plan(kind, one, world_size=ranks.world_size) for one in chosen]
    medians: list[list[float]] = [[] for _ in plans]
    for _ in range(2 if count == len(samples) else 1):
        for plan, rounds in zip(plans, medians, strict=True):
            times = _time_steps_of_plan(plan, ranks, seconds=seconds / (2 * len(plans)))
            rounds.append(statistics.median(times))
            gc.collect()
            if kind == "cuda":
                torch.cuda.empty_cache()
    measured = zip(plans, medians, strict=True)
    return tuple(MeasuredStep(plan=plan, seconds=min(rounds)) for plan, rounds in measured)


def _build_sample_plan(
    kind: Literal["cpu", "cuda"], sample: tuple[str, int, int, int, str], *, world_size: int
) -> Plan:
    size, tokens, microbatch, accumulation, more = sample
    shares = "tensor_parallel" in more or "context_parallel" in more
    overrides = [
        *(f"model.{one}" for one in _SIZES[kind][size].split()),
        "model.max_sequence=8192",
        f"data.sequence_length={tokens * (_LONGER_ON_GPUS if kind == 'cuda' else 1)}",
        f"train.microbatch={microbatch}",
        f"train.global_batch={microbatch * accumulation * world_size // (2 if shares else 1)}",
        f"precision.mode={'bf16' if kind == 'cuda' else 'fp32'}",
        *more.split(),
    ]
    return Plan.from_run(Run.load(overrides=overrides), world_size=world_size, device=kind)


def _time_steps_of_plan(plan: Plan, ranks: RankInfo, *, seconds: float) -> Sequence[float]:
    """Returns the seconds of each of 2 to 12 steps, as many as fit in `seconds`, as the mean over ranks."""
    state = _build_train_state(plan)
    loss = choose_loss(plan.run, state.model)
    shape = (plan.microbatch, plan.run.data.sequence_length)
    tokens = torch.randint(0, plan.run.decoder_config.vocabulary, shape, device=ranks.device)
    batch = cut_sequences({"tokens": tokens, "labels": tokens}, plan)

    def run_timed_step() -> float:
        started = time.perf_counter()
        batches = [batch] * plan.accumulation
        run_step(state, plan, microbatches=batches, loss=loss)
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
