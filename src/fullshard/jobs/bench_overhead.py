"""The overhead of fullshard's step over a hand-written `fully_shard` loop, timed alternately in one job."""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fullshard.data.build import build_data
from fullshard.errors import PlanError
from fullshard.models.decoder import DecoderModel
from fullshard.sharding.apply import shard
from fullshard.sharding.collectives import use_gloo_collectives
from fullshard.sharding.mesh import build_mesh, process_group
from fullshard.sharding.precision import TORCH_DTYPE
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Strategy
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.state import TrainState
from fullshard.training.step import to_device

# Single steps alternate, so that other load on the machine affects both alike; the median excludes outliers.
PAIRS, STEPS_A_TURN, WARMUP_TURNS = 60, 1, 5
RESULT_NAME = "overhead.json"


def run_overhead(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Runs one rank of `fullshard bench overhead`. Rank 0 writes `<run.dir>/overhead.json`."""
    del resume, command_started
    turns = WARMUP_TURNS + PAIRS
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": turns * STEPS_A_TURN})})
    with process_group(run.run.device) as ranks:
        plan = Plan.from_run(
            run, world_size=ranks.world_size, device="cuda" if ranks.device.type == "cuda" else "cpu"
        )
        if plan.strategy is not Strategy.FULL_SHARD or plan.accumulation != 1 or run.recompute.mode != "none":
            raise PlanError(
                "the hand-written loop is full_shard, without accumulation and recompute.",
                got=f"{plan.strategy}, accumulation {plan.accumulation}, recompute {run.recompute.mode}",
                fix="pin those in the run",
            )
        peers = {
            "fullshard": _our_steps(plan),
            "plain": _plain_steps(plan, own_collectives=False),
            "plain_same_collectives": _plain_steps(plan, own_collectives=True),
        }
        seconds = _in_turns(peers, turns=turns, device=ranks.device)
        if ranks.rank == 0:
            Path(run.run.dir).mkdir(parents=True, exist_ok=True)
            result = summary(seconds[WARMUP_TURNS:], plan)
            Path(run.run.dir, RESULT_NAME).write_text(json.dumps(result, indent=2))


def summary(turns: list[dict[str, float]], plan: Plan) -> dict[str, object]:
    """Returns each peer's median ratio fullshard / peer per turn, with its 95 % interval (bootstrap)."""
    peers = [name for name in turns[0] if name != "fullshard"]
    return {
        "turns": len(turns),
        "steps_a_turn": STEPS_A_TURN,
        "seconds_a_step": {
            name: statistics.median(turn[name] for turn in turns) / STEPS_A_TURN for name in turns[0]
        },
        "ratios": {peer: _spread([turn["fullshard"] / turn[peer] for turn in turns]) for peer in peers},
        "world_size": plan.world_size,
        "device": plan.device,
        "torch": torch.__version__,
    }


def _spread(ratios: list[float]) -> dict[str, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": statistics.median(ratios),
        "low": medians[50],
        "high": medians[-51],
        "smallest": min(ratios),
        "largest": max(ratios),
    }


def _in_turns(
    peers: dict[str, Callable[[], None]], *, turns: int, device: torch.device
) -> list[dict[str, float]]:
    """Returns the seconds that each peer takes in each turn.

    The peer that starts a turn ends the next one.
    """
    seconds: list[dict[str, float]] = []
    order = list(peers)
    for _ in range(turns):
        seconds.append({})
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                peers[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            seconds[-1][name] = time.perf_counter() - started
        order = [*order[1:], order[0]]
    return seconds


def _our_steps(plan: Plan) -> Callable[[], None]:
    with torch.device("meta"):
        model = DecoderModel(plan.run.decoder)
    shard(model, plan)
    steps = train(TrainState(model, build_optimizer(model, plan), data=build_data(plan.run)), plan)

    def step() -> None:
        next(steps)

    return step


def _plain_steps(plan: Plan, *, own_collectives: bool) -> Callable[[], None]:
    """Returns a step written by hand on plain torch: same units, dtypes, optimizer and clipping.

    own_collectives: use the collectives that fullshard gives FSDP2 on CPU meshes, to separate their gain from
        the cost of the step itself
    """
    run, mesh = plan.run, build_mesh(plan)
    torch.manual_seed(run.run.seed)
    model = DecoderModel(run.decoder).to(plan.device)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[plan.precision.param], reduce_dtype=TORCH_DTYPE[plan.precision.reduce]
    )
    fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if own_collectives and plan.device == "cpu":
        for unit in (model.embedding, *model.blocks, model.norm, model):
            use_gloo_collectives(cast(FSDPModule, unit))
    section = run.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True
    )
    batches = _endless(plan)

    def step() -> None:
        batch = next(batches)
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        # Figures that any training log shows: the mean loss over ranks, and the global norm.
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        _ = loss.item() / plan.world_size, _whole(norm).item()

    return step


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _endless(plan: Plan) -> Iterator[dict[str, Tensor]]:
    data, rank, device = build_data(plan.run), dist.get_rank(), torch.device(plan.device)
    step = 0
    while True:
        for batch in data.microbatches(step, rank=rank, plan=plan):
            yield to_device(batch, device)
        step += 1
