"""Optimizer state on a drive, ours and DeepSpeed's ZeRO-3, in pairs: the page bench/results/…-deepspeed.md.

python bench/against_deepspeed.py --deepspeed-python PATH [--tier nvme|cpu|none] [--turns 5] [--steps 8]

The reference decoder in fp32 over gloo ranks of this machine, with the same values, batches, AdamW and
clipping on both sides, the update in groups of the same size, and the state in the same directory. Each turn
one side trains and then the other, in the other order the next turn; a side is a torchrun of its own. Of
each: the median step, the mean until all is on the drive, the processor time of all ranks (what else the
host does disturbs it less than the step), the peak of a rank's memory in steps over what it had after its
imports (VmHWM, which Linux lets a process reset), and bytes to and from the drive (/proc/self/io).

DeepSpeed wants an environment of its own: a Python with torch, deepspeed, xxhash and what this package
depends on, whose PATH is given here; and for `nvme` libaio's headers and library where g++ and the loader
look for them (CPATH, LIBRARY_PATH, LD_LIBRARY_PATH). It builds its kernels in the first turn, which that one
has to wait for. Without it, ours runs alone.
"""

import argparse
import cProfile
import ctypes
import gc
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

ROOT = Path(__file__).parents[1]
SIDES = ("ours", "deepspeed")
SIZES = [
    "model.d_model=768",
    "model.layers=16",
    "model.heads=12",
    "model.kv_heads=6",
    "model.d_ff=2048",
    "data.sequence_length=32",
    "train.global_batch=4",
    "train.steps=100000",
    "optimizer.learning_rate=3e-4",
    "optimizer.weight_decay=0",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
    "sharding.strategy=full_shard",
    "precision.mode=fp32",
    "recompute.mode=none",
    "offload.sub_group_parameters=8000000",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--deepspeed-python", type=Path)
    parser.add_argument("--tier", choices=("nvme", "cpu", "none"), default="nvme")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured ones, of each side and turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path(".probe"))
    parser.add_argument("--aio", type=json.loads, default={}, help="DeepSpeed's section of this name, JSON")
    parser.add_argument("--zero", type=json.loads, default={}, help="likewise, over zero_optimization")
    parser.add_argument("--profile", action="store_true", help="a table of rank 0's steps; not to be timed")
    parser.add_argument("--side", choices=SIDES, help="what a rank is started with")
    parser.add_argument("--out", type=Path, help="likewise")
    parser.add_argument("settings", nargs="*", help="section.key=value, of the run")
    asked = parser.parse_args()
    if asked.side is None:
        in_pairs(asked)
    else:
        train_as(asked)


# Of the process that starts the others


def in_pairs(asked: argparse.Namespace) -> None:
    pythons = {"ours": Path(sys.executable)}
    if asked.deepspeed_python is None:
        print(
            "ours alone: --deepspeed-python is not given. " + (__doc__ or "").partition("\n\n")[2], flush=True
        )
    else:
        pythons["deepspeed"] = asked.deepspeed_python
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
    for turn in range(asked.turns):
        for side in list(pythons) if turn % 2 == 0 else reversed(list(pythons)):
            rows[side].append(run_side(side, asked, python=pythons[side]))
            print(row_text(f"{turn} {side}", rows[side][-1]), flush=True)
        if "deepspeed" in rows:
            print(compared(str(turn), rows["ours"][-1], rows["deepspeed"][-1]), flush=True)
    for side, own in rows.items():
        print(row_text(f"median {side}", medians(own)))
    if "deepspeed" in rows:
        ratios = [
            one["seconds"] / other["seconds"]
            for one, other in zip(rows["ours"], rows["deepspeed"], strict=True)
        ]
        print(compared("medians", medians(rows["ours"]), medians(rows["deepspeed"])))
        print(f"step time of ours, of DeepSpeed's: median of pairs {statistics.median(ratios):.3f}")


def run_side(side: str, asked: argparse.Namespace, *, python: Path) -> dict[str, Any]:
    """Its ranks, from nothing on the drive to nothing left there."""
    directory = asked.directory.absolute() / "against-deepspeed"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.sync()
    time.sleep(1)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks)]
        command = [str(python), *ranks, __file__, "--side", side, "--out", out.name]
        for name in ("tier", "steps", "warmup"):
            command += [f"--{name}", str(getattr(asked, name))]
        command += ["--directory", str(directory)]
        command += ["--aio", json.dumps(asked.aio), "--zero", json.dumps(asked.zero)]
        command += ["--profile"] if asked.profile else []
        # PATH: DeepSpeed builds its kernels with the ninja of its own environment.
        own = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "DS_ACCELERATOR": "cpu",
            "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        log = asked.directory / f"against-deepspeed-{side}.log"
        with log.open("w") as text:
            ended = subprocess.run(
                [*command, *asked.settings], env={**os.environ, **own}, stdout=text, stderr=text, check=False
            )
        if ended.returncode:
            sys.exit(f"{side} ended with {ended.returncode}: see {log}\n{log.read_text()[-3000:]}")
        found = json.loads(Path(out.name).read_text())
    shutil.rmtree(directory)
    return found


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key for key, value in rows[0].items() if isinstance(value, int | float)}
    middle = {key: statistics.median(row[key] for row in rows) for key in numbers}
    return rows[0] | middle


def row_text(name: str, row: dict[str, Any]) -> str:
    return (
        f"{name}: step {row['seconds']:.3f} s ({row['compute']:.3f} forward and backward, "
        f"{row['update']:.3f} update), {row['whole']:.3f} s each until all is through, "
        f"{row['processor']:.2f} s of processors; peak "
        f"{row['peak'] / 1e6:.0f} MB a rank over its imports (whole model {row['state'] / 1e6:.0f} MB of "
        f"parameters and state); {row['read'] / 1e6:.0f} MB read, {row['written'] / 1e6:.0f} MB written "
        f"a step by all ranks; losses {row['losses'][0]:.4f} … {row['losses'][-1]:.4f}"
    )


def compared(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    apart = max(abs(one - other) for one, other in zip(ours["losses"], theirs["losses"], strict=True))
    ratios = {key: ours[key] / max(1, theirs[key]) for key in ("peak", "read", "written")}
    return (
        f"{name}, ours / DeepSpeed: step {ours['seconds'] / theirs['seconds']:.3f}, until all is through "
        f"{ours['whole'] / theirs['whole']:.3f}, peak {ratios['peak']:.2f}, read {ratios['read']:.2f}, "
        f"written {ratios['written']:.2f}; losses apart by at most {apart:.1e}"
    )


# Of a rank


def train_as(asked: argparse.Namespace) -> None:
    offload = [] if asked.tier == "none" else [f"offload.tier=optimizer:{asked.tier}"]
    where = [f"run.dir={asked.directory}", f"offload.path={asked.directory / 'state'}"]
    run = Run.load(overrides=[*SIZES, *offload, *where, *asked.settings])
    measure = train_ours if asked.side == "ours" else train_deepspeed
    measure(run, asked)


def batches(run: Run, *, rank: int, ranks: int) -> Iterator[dict[str, Tensor]]:
    """This rank's rows of each step, which count up from somewhere: what comes next can be learnt."""
    rows, length = run.train.global_batch // ranks, run.data.sequence_length
    for step in range(run.train.steps):
        starts = torch.randint(0, 256, (rows * ranks, 1), generator=torch.Generator().manual_seed(step))
        tokens = (starts + torch.arange(length + 1)) % run.decoder_config.vocabulary
        own = tokens[rank * rows : (rank + 1) * rows]
        yield {"tokens": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()}


def train_ours(run: Run, asked: argparse.Namespace) -> None:
    from fullshard.parallel.mesh import process_group
    from fullshard.training.loop import train
    from fullshard.training.optimizer import build_optimizer
    from fullshard.training.shard import shard
    from fullshard.training.state import TrainState

    with process_group("cpu") as ranks:
        measured = Measured(asked)
        plan = Plan.from_run(run, world_size=ranks.world_size)
        with torch.device("meta"):
            model = DecoderModel(run.decoder_config)
        model = shard(model, plan)
        data = batches(run, rank=ranks.rank, ranks=ranks.world_size)
        state = TrainState(model, build_optimizer(model, plan), data=data)
        began = [0.0]
        state.optimizer.register_step_pre_hook(lambda *_: began.append(time.perf_counter()))
        steps = train(state, plan)

        def step() -> tuple[float, float]:
            loss = next(steps).loss
            return loss, began[-1]

        measured.go(step, settle=state.wait_for_updates)
        measured.tell(run, parameters=sum(p.numel() for p in model.parameters()))


def train_deepspeed(run: Run, asked: argparse.Namespace) -> None:
    import deepspeed

    from fullshard.parallel.materialize import materialize

    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What it imports when it is first used counts as imported.
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: F401

    measured = Measured(asked)
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    model = materialize(model, seed=run.run.seed)
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=deepspeed_config(run, asked, ranks=ranks),
    )
    data = batches(run, rank=rank, ranks=ranks)

    def step() -> tuple[float, float]:
        total, count = next_token_loss(engine, next(data))
        mean = total / count
        engine.backward(mean)
        began = time.perf_counter()
        engine.step()
        logged = mean.detach().clone()
        dist.all_reduce(logged)  # after the step, as a run that logs its loss does; ours has it in its own
        return logged.item() / ranks, began

    measured.go(step, settle=lambda: None)
    measured.tell(run, parameters=parameters)


def deepspeed_config(run: Run, asked: argparse.Namespace, *, ranks: int) -> dict[str, Any]:
    """Optimizer offload with both pipelines on, and buckets by the model's width, as transformers sets them
    for "auto": those of its defaults are for far larger models, and slow it down here."""
    section, width = run.optimizer, run.decoder_config.d_model
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": run.offload.sub_group_parameters,
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    if asked.tier != "none":
        zero["offload_optimizer"] = {"device": asked.tier, "pin_memory": True}
    if asked.tier == "nvme":
        # Four tensors each of the group that is updated, the one read and the one written.
        pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
        zero["offload_optimizer"] |= {"nvme_path": str(asked.directory / "state"), **pipeline}
    return {
        "train_batch_size": run.train.global_batch,
        "train_micro_batch_size_per_gpu": run.train.global_batch // ranks,
        "gradient_clipping": section.clip_norm,
        "zero_optimization": zero | asked.zero,
        "aio": asked.aio,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": section.learning_rate,
                "betas": list(section.betas),
                "eps": section.eps,
                "weight_decay": section.weight_decay,
            },
        },
        "wall_clock_breakdown": False,
    }


class Measured:
    """Measures one rank, from its imports on."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        gc.collect()
        self.imported = memory("VmRSS")
        self.seen: dict[str, Any] = {}

    def go(self, step: Callable[[], tuple[float, float]], *, settle: Callable[[], None]) -> None:
        """`step`: one step's loss, and the time at which its update began."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what making the model has left behind
        reset_peak()
        losses = [step()[0] for _ in range(self.asked.warmup)]
        settle()
        dist.barrier()
        moved, worked = transferred(), time.process_time()
        times: list[tuple[float, float]] = []
        started = time.perf_counter()
        with profiled(self.asked):
            for _ in range(self.asked.steps):
                before = time.perf_counter()
                loss, updating = step()
                times.append((updating - before, time.perf_counter() - updating))
                losses.append(loss)
            settle()
        dist.barrier()
        ended = time.perf_counter()
        after, worked = transferred(), time.process_time() - worked
        steps = self.asked.steps
        self.seen = {
            "seconds": statistics.median(sum(one) for one in times),
            "compute": statistics.median(one for one, _ in times),
            "update": statistics.median(other for _, other in times),
            "whole": (ended - started) / steps,
            "processor": worked / steps,
            "peak": memory("VmHWM") - self.imported,
            "read": (after[0] - moved[0]) / steps,
            "written": (after[1] - moved[1]) / steps,
            "losses": losses,
        }

    def tell(self, run: Run, *, parameters: int) -> None:
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, self.seen)
        if dist.get_rank() == 0:
            worst = {key: max(row[key] for row in rows) for key in ("seconds", "peak", "whole")}
            total = {key: sum(row[key] for row in rows) for key in ("read", "written", "processor")}
            found = rows[0] | worst | total | {"state": parameters * 16}
            self.asked.out.write_text(json.dumps(found))


@contextmanager
def profiled(asked: argparse.Namespace) -> Iterator[None]:
    """Prints, if asked, where the thread that trains on rank 0 was, waiting included."""
    if not asked.profile or dist.get_rank() != 0:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def transferred() -> tuple[int, int]:
    """Bytes that this process has had the drive read and write."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {name: int(value) for name, value in pairs}
    return found["read_bytes"], found["write_bytes"]


def memory(key: str) -> int:
    """Bytes, as Linux tells of this process: VmRSS, VmHWM (the highest RSS)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
