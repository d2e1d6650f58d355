"""Shows whether a leak is named in small runs that leak, and in none that do not.

    PYTHONPATH=. python bench/leaks.py [--steps 150]

Ten kinds of runs on two CPU ranks, each without a leak and with one of 1 MiB per step on rank 1. Prints the
events `leak` of each: (step, rank, bytes per step). Thresholds: `fullshard.observe.memory_watch`.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from tests.observe.test_memory_watch import KEPT
from tests.ranks import Workers

MODEL = ("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=32", "data.sequence_length=16")
SETTINGS = ("train.global_batch=8", "train.validate_sequences=4", "log.sample_tokens=0")
KINDS = (
    ("checkpoint.every=20",),
    ("train.validate_every=15",),
    ("checkpoint.every=25", "checkpoint.mode=async"),
    ("sharding.strategy=no_shard",),
    ("recompute.mode=full",),
    ("train.microbatch=1",),
    ("log.profile=[30,31]",),
    ("data.packing=best_fit",),
    ("train.validate_every=40",),
)


def train(directory: str, settings: tuple[str, ...]) -> None:
    run = Run.load(overrides=[*MODEL, *SETTINGS, f"run.dir={directory}", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())
    KEPT.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    workers = Workers()
    pool = workers.pool(2)
    for number, kind in enumerate(KINDS):
        for leaks in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                settings = (f"train.steps={steps}", f"run.seed={100 + number}", *kind)
                settings += ("train.loss=tests.observe.test_memory_watch:leaking_loss",) if leaks else ()
                pool.run(train, f"{directory}/run", settings)
                events = read_events(Path(directory, "run", EVENTS))
            found = [(one.step, one.details) for one in events if one.event == "leak"]
            print(" ".join(kind), "leaks" if leaks else "clean", found, flush=True)
    workers.close()


if __name__ == "__main__":
    main()
