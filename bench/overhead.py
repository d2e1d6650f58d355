"""Cost of fullshard's step over a loop written by hand in plain torch, timed alternately in one job.

    torchrun --nproc-per-node 2 bench/overhead.py [RUN.toml] [--set SECTION.KEY=VALUE] [--json]
        [--strategies full_shard,no_shard] [--precisions fp32,bf16] [--turns 60] [--steps 1]

The loop by hand is DDP for no_shard (under autocast if the precision is mixed), and `fully_shard` with the
settings of the strategy otherwise; under accumulation it synchronises as the plan says. Each pair of strategy
and precision is a cell of its own. Prints a table for `bench/results/`, or all ratios as JSON. Without
torchrun: one rank.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fullshard.data.build import build_data
from fullshard.distributed.collectives import replace_gloo_collectives
from fullshard.models.decoder import DecoderModel
from fullshard.parallel.mesh import build_mesh, process_group
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Strategy
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import move_batch_to_device

# Turns alternate, so that other load on the machine affects both alike; the median excludes outliers.
WARMUP_TURNS = 3
# Steps small enough that time outside of computing is visible.
SETTINGS = ("data.sequence_length=128", "train.global_batch=4", "precision.mode=fp32")
PLAIN, SAME = "plain", "plain_same_collectives"
PEERS = {PLAIN: "plain torch", SAME: "the same with fullshard's gloo collectives"}


def main() -> None:
    asked = _parse_arguments()
    settings = SETTINGS if asked.run is None else ()
    with process_group(Run.load(asked.run, overrides=[*settings, *asked.set]).run.device) as ranks:
        cells: list[dict[str, Any]] = []
        for strategy in asked.strategies.split(","):
            for precision in asked.precisions.split(","):
                steps = asked.steps * (WARMUP_TURNS + asked.turns)
                own = [f"sharding.strategy={strategy}", f"precision.mode={precision}", f"train.steps={steps}"]
                run = Run.load(asked.run, overrides=[*settings, *asked.set, *own])
                device = "cuda" if ranks.device.type == "cuda" else "cpu"
                plan = Plan.from_run(run, world_size=ranks.world_size, device=device)
                cells.append(measure_cell(plan, asked, device=ranks.device))
                if ranks.rank == 0 and not asked.json:
                    print(page(cells[-1], is_first=len(cells) == 1), flush=True)
        if ranks.rank == 0 and asked.json:
            print(json.dumps(cells, indent=2))


def _parse_arguments() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("run", nargs="?", type=Path, help="a run.toml; the embedded default otherwise")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments.add_argument("--strategies", default="full_shard", help="separated by commas (full_shard)")
    arguments.add_argument("--precisions", default="fp32", help="separated by commas (fp32)")
    arguments.add_argument("--turns", type=int, default=60, help="turns that are timed (60)")
    arguments.add_argument("--steps", type=int, default=1, help="steps of each peer in a turn (1)")
    arguments.add_argument(
        "--collectives", action="store_true", help="a second peer: the loop by hand with ours"
    )
    arguments.add_argument("--json", action="store_true", help="all ratios as JSON")
    return arguments.parse_args()


def measure_cell(plan: Plan, asked: argparse.Namespace, *, device: torch.device) -> dict[str, Any]:
    """Returns the figures of one plan: see `summary`."""
    if plan.run.recompute.mode != "none":
        raise SystemExit("the loop by hand has no recompute: pin it")
    peers = {"fullshard": _our_steps(plan), PLAIN: _plain_steps(plan, own_collectives=False)}
    if asked.collectives and plan.strategy is not Strategy.NO_SHARD:
        peers[SAME] = _plain_steps(plan, own_collectives=True)
    turns = _in_turns(peers, turns=WARMUP_TURNS + asked.turns, steps=asked.steps, device=device)
    peers.clear()
    gc.collect()  # before the next cell's models are made
    return summary(turns[WARMUP_TURNS:], plan)


def summary(turns: list[dict[str, tuple[float, float]]], plan: Plan) -> dict[str, Any]:
    """Each peer's median ratio peer / fullshard per turn, with its 95 % interval (bootstrap).

    turns: for each peer, seconds of a step, and processor seconds of all ranks together
    """
    peers = [name for name in turns[0] if name != "fullshard"]
    return {
        "strategy": str(plan.strategy),
        "precision": plan.run.precision.mode,
        "turns": len(turns),
        "seconds_a_step": {name: statistics.median(turn[name][0] for turn in turns) for name in turns[0]},
        "processor_seconds": {name: statistics.median(turn[name][1] for turn in turns) for name in turns[0]},
        "speed": {peer: _spread([turn[peer][0] / turn["fullshard"][0] for turn in turns]) for peer in peers},
        "processor": {
            peer: _spread([turn[peer][1] / turn["fullshard"][1] for turn in turns]) for peer in peers
        },
        "world_size": plan.world_size,
        "device": plan.device,
        "torch": torch.__version__,
    }


def page(cell: dict[str, Any], *, is_first: bool) -> str:
    """The figures as Markdown for `bench/results/`: rows of one table, with its head if `is_first`."""
    lines = [
        f"{cell['world_size']} ranks on {cell['device']}, torch {cell['torch']}; "
        f"{cell['turns']} turns in one job. "
        "Speed: time of the peer / time of fullshard, the median of the turns.",
        "",
        "| strategy | precision | peer | fullshard | peer | speed | 95 % interval | range | processor time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines = lines if is_first else []
    seconds = cell["seconds_a_step"]
    for peer, ratio in cell["speed"].items():
        name = "DDP" if peer == PLAIN and cell["strategy"] == "no_shard" else PEERS[peer]
        lines.append(
            f"| {cell['strategy']} | {cell['precision']} | {name} | {1000 * seconds['fullshard']:.1f} ms | "
            f"{1000 * seconds[peer]:.1f} ms | **{ratio['median']:.3f}** | "
            f"{ratio['low']:.3f} to {ratio['high']:.3f} | "
            f"{ratio['smallest']:.3f} to {ratio['largest']:.3f} | {cell['processor'][peer]['median']:.3f} |"
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
    peers: dict[str, Callable[[], None]], *, turns: int, steps: int, device: torch.device
) -> list[dict[str, tuple[float, float]]]:
    """Returns the seconds of a step, and the processor seconds of all ranks, of each peer in each turn.

    The peer that starts a turn ends the next one.
    """
    seconds: list[dict[str, tuple[float, float]]] = []
    order = list(peers)
    for _ in range(turns):
        seconds.append({})
        for name in order:
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            for _ in range(steps):
                peers[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier()
            measured = torch.tensor(
                [time.perf_counter() - started, time.process_time() - worked],
                dtype=torch.float64,
                device=device,
            )
            dist.all_reduce(measured)
            elapsed, processor = (measured / steps).tolist()
            seconds[-1][name] = (elapsed / dist.get_world_size(), processor)
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
    torch.manual_seed(plan.run.run.seed)
    model = DecoderModel(plan.run.decoder_config).to(plan.device)
    is_replicated = plan.strategy is Strategy.NO_SHARD
    engine = _replicate(model, plan) if is_replicated else _fully_shard(model, plan, own_collectives)
    section = plan.run.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True
    )
    batches = _endless(plan)
    autocast = is_replicated and plan.precision.param != "fp32"

    def backward() -> Tensor:
        batch = next(batches)
        with torch.autocast(plan.device, TORCH_DTYPE[plan.precision.param], enabled=autocast):
            logits = engine(batch["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss = loss / plan.accumulation
        loss.backward()
        return loss.detach()

    def step() -> None:
        total = torch.zeros((), device=plan.device)
        for index in range(plan.accumulation):
            with _synchronised(engine, plan, is_last=index == plan.accumulation - 1):
                total += backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        # Figures that any training log shows: the mean loss over ranks, and the global norm.
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        _ = total.item() / plan.world_size, _whole(norm).item()

    return step


def _replicate(model: nn.Module, plan: Plan) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if plan.world_size > 1 else model


def _fully_shard(model: DecoderModel, plan: Plan, own_collectives: bool) -> nn.Module:
    mesh, reshard = build_mesh(plan), plan.reshard_after_forward
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[plan.precision.param], reduce_dtype=TORCH_DTYPE[plan.precision.reduce]
    )
    for module in (model.embedding, *model.blocks):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if own_collectives and plan.device == "cpu":
        for unit in (model.embedding, *model.blocks, model.norm, model):
            replace_gloo_collectives(cast(FSDPModule, unit))
    return model


def _synchronised(engine: nn.Module, plan: Plan, *, is_last: bool) -> AbstractContextManager[None]:
    """Returns the context of one microbatch, whose backward synchronises gradients as the plan says."""
    if isinstance(engine, DistributedDataParallel):
        return nullcontext() if is_last else engine.no_sync()
    if isinstance(engine, FSDPModule) and plan.accumulation > 1:
        engine.set_requires_gradient_sync(is_last or plan.sync_each_microbatch)
        engine.set_reshard_after_backward(is_last or plan.reshard_after_forward)
    return nullcontext()


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
