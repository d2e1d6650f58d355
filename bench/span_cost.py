"""Processor time that recording spans and comparing ranks costs, in alternating pairs of steps in one job.

    torchrun --nproc-per-node 2 bench/span_cost.py [RUN.toml] [--set SECTION.KEY=VALUE] [--pairs 60]

Each pair is a turn of steps with everything that a run observes, and a turn without. `sampled` also writes
the spans of every step. Prints the median ratio of processor time (all threads of all ranks) to the turns
without, with its 95 % interval (bootstrap).
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from fullshard.data.build import build_data
from fullshard.distributed.agreement import all_gather_object
from fullshard.jobs.run_log import RunLog
from fullshard.jobs.step_observer import observe_steps
from fullshard.models.build import build_model
from fullshard.sharding.mesh import process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker
from fullshard.training.loop import Step, train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

WARMUP_PAIRS, STEPS_OF_A_TURN = 2, 2
KINDS = {"off": 0, "always on": 10**9, "sampled": 1}  # kind of turn -> steps between samples


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("run", nargs="?", type=Path)
    asked.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    asked.add_argument("--pairs", type=int, default=60)
    given = asked.parse_args()
    turns = (given.pairs + WARMUP_PAIRS) * len(KINDS)
    steps = f"train.steps={turns * STEPS_OF_A_TURN}"
    run = Run.load(given.run, overrides=["sharding.strategy=full_shard", *given.set, steps])
    with process_group(run.run.device) as ranks, tempfile.TemporaryDirectory() as directory:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        plan = Plan.from_run(run, world_size=ranks.world_size, device=device)
        model = build_model(run)
        shard(model, plan)
        state = TrainState(model, build_optimizer(model, plan), data=build_data(run))
        state.phase = PhaseTracker()
        found = _measure(train(state, plan), state, directory=Path(directory), pairs=given.pairs)
        if ranks.rank == 0:
            for kind, ratios in found.items():
                low, middle, high = _interval(ratios)
                print(f"{kind}: {100 * middle:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})")


def _measure(
    steps: Iterator[Step], state: TrainState, *, directory: Path, pairs: int
) -> dict[str, list[float]]:
    """Returns kind of turn -> its processor time over that of the turn without, less 1, per pair."""
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS if kind != "off"}
    for pair in range(pairs + WARMUP_PAIRS):
        order = list(KINDS)
        random.Random(pair).shuffle(order)  # noqa: S311
        took: dict[str, float] = {}
        for kind in order:
            with ExitStack() as stack:
                observer = stack.enter_context(
                    observe_steps(
                        state.model,
                        state.phase,
                        log=RunLog(every=10),
                        directory=directory,
                        every=KINDS[kind],
                        first_step=state.step + 1,
                    )
                )
                started = time.process_time()
                for _ in range(STEPS_OF_A_TURN):
                    observer.observe_step(next(steps))
                took[kind] = sum(all_gather_object(time.process_time() - started))
        for kind in ratios if pair >= WARMUP_PAIRS else ():
            ratios[kind].append(took[kind] / took["off"] - 1)
    return ratios


def _interval(values: list[float]) -> tuple[float, float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], statistics.median(values), medians[975]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
