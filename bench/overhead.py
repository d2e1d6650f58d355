"""What fullshard's step costs over a `fully_shard` loop written by hand, timed alternately in one job.

    torchrun --nproc-per-node 2 bench/overhead.py [RUN.toml] [--set SECTION.KEY=VALUE] [--json]

Prints a table for `bench/results/`, or all ratios as JSON. Without torchrun: one rank.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fullshard.data.build import build_data
from fullshard.models.decoder import DecoderModel
from fullshard.sharding.apply import shard
from fullshard.sharding.collectives import replace_gloo_collectives
from fullshard.sharding.mesh import build_mesh, process_group
from fullshard.sharding.precision import TORCH_DTYPE
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Strategy
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.state import TrainState
from fullshard.training.step import move_batch_to_device

# Single steps alternate, so that other load on the machine affects both alike; the median excludes outliers.
WARMUP_TURNS = 5
# Steps small enough that time outside of computing is visible.
SETTINGS = ("data.sequence_length=128", "train.global_batch=4", "precision.mode=fp32")
PEERS = {
    "plain": "a plain `fully_shard` loop",
    "plain_same_collectives": "the same loop with fullshard's gloo collectives",
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("run", nargs="?", type=Path, help="a run.toml; the embedded default otherwise")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments.add_argument("--turns", type=int, default=60, help="turns that are timed (60)")
    arguments.add_argument("--json", action="store_true", help="all ratios as JSON")
    asked = arguments.parse_args()
    turns = WARMUP_TURNS + asked.turns
    settings = SETTINGS if asked.run is None else ()
    run = Run.load(asked.run, overrides=[*settings, *asked.set, f"train.steps={turns}"])
    with process_group(run.run.device) as ranks:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        plan = Plan.from_run(run, world_size=ranks.world_size, device=device)
        if (
            plan.strategy is not Strategy.FULL_SHARD
            or plan.accumulation != 1
            or plan.run.recompute.mode != "none"
        ):
            raise SystemExit("the loop by hand is full_shard, without accumulation and recompute: pin those")
        peers = {
            "fullshard": _our_steps(plan),
            "plain": _plain_steps(plan, own_collectives=False),
            "plain_same_collectives": _plain_steps(plan, own_collectives=True),
        }
        seconds = _in_turns(peers, turns=turns, device=ranks.device)
        result = summary(seconds[WARMUP_TURNS:], plan)
        if ranks.rank == 0:
            print(json.dumps(result, indent=2) if asked.json else page(result))


def summary(turns: list[dict[str, float]], plan: Plan) -> dict[str, Any]:
    """Each peer's median ratio fullshard / peer per turn, with its 95 % interval (bootstrap)."""
    return {
        "turns": len(turns),
        "seconds_a_step": {name: statistics.median(turn[name] for turn in turns) for name in turns[0]},
        "ratios": {peer: _spread([turn["fullshard"] / turn[peer] for turn in turns]) for peer in PEERS},
        "world_size": plan.world_size,
        "device": plan.device,
        "torch": torch.__version__,
    }


def page(result: dict[str, Any]) -> str:
    """The figures as Markdown for `bench/results/`."""
    seconds = result["seconds_a_step"]
    lines = [
        f"{result['world_size']} ranks on {result['device']}, torch {result['torch']}; "
        f"{result['turns']} turns of 1 step each, in one job. "
        f"fullshard: {1000 * seconds['fullshard']:.1f} ms a step (median).",
        "",
        "| against | step | ratio fullshard / peer, median | 95 % interval | range |",
        "|---|---|---|---|---|",
    ]
    for peer, ratio in result["ratios"].items():
        lines.append(
            f"| {PEERS[peer]} | {1000 * seconds[peer]:.1f} ms | **{ratio['median']:.3f}** | "
            f"{ratio['low']:.3f} to {ratio['high']:.3f} | {ratio['smallest']:.3f} to {ratio['largest']:.3f} |"
        )
    return "\n".join(lines)


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
            peers[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            seconds[-1][name] = time.perf_counter() - started
        order = [*order[1:], order[0]]
    return seconds


def _our_steps(plan: Plan) -> Callable[[], None]:
    with torch.device("meta"):
        model = DecoderModel(plan.run.decoder_config)
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
    model = DecoderModel(run.decoder_config).to(plan.device)
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
            replace_gloo_collectives(cast(FSDPModule, unit))
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
            yield move_batch_to_device(batch, device)
        step += 1


if __name__ == "__main__":
    main()
