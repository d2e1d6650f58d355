"""Processor time that recording spans and comparing ranks costs, in alternating pairs of steps in one job.

    chrt -r 1 torchrun --nproc-per-node 2 bench/span_cost.py [RUN.toml] [--set SECTION.KEY=VALUE] [--pairs 60]

Each pair is a turn of steps with everything that a run observes, and a turn without. In `always on`, the
steps are those between two samples; in `sampled`, each step has the spans of its units, and is written; in
`memory`, the ranks exchange their memory after each step, which runs do after every 20th.
Prints the difference of processor time (all threads of all ranks) to the turns without: the mean of the
middle half of the pairs, with its 95 % interval (bootstrap). `off again` are turns without, as a control.
`chrt -r 1` keeps other programs off the cores.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch

from fullshard.data.build import build_data
from fullshard.distributed.agreement import all_gather_object
from fullshard.jobs.memory_watch import WINDOW, MemoryWatch
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

WARMUP_PAIRS, STEPS_OF_A_TURN = 3, 2
OFF, CONTROL, MEMORY, NEVER = "off", "off again", "memory", 10**9
KINDS = {OFF: 0, CONTROL: 0, "always on": NEVER, "sampled": 1, MEMORY: 0}  # kind -> steps between samples


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("run", nargs="?", type=Path)
    asked.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    asked.add_argument("--pairs", type=int, default=60)
    asked.add_argument("--kind", choices=list(KINDS)[2:], help="kind of turn; all")
    given = asked.parse_args()
    kinds = [kind for kind in KINDS if given.kind in (None, kind) or kind in (OFF, CONTROL)]
    turns = (given.pairs + WARMUP_PAIRS) * len(kinds)
    steps = f"train.steps={turns * STEPS_OF_A_TURN}"
    run = Run.load(given.run, overrides=["sharding.strategy=full_shard", *given.set, steps])
    with process_group(run.run.device) as ranks, tempfile.TemporaryDirectory() as directory:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        plan = Plan.from_run(run, world_size=ranks.world_size, device=device)
        model = build_model(run)
        shard(model, plan)
        state = TrainState(model, build_optimizer(model, plan), data=build_data(run))
        state.phase = PhaseTracker()
        steps_of_run = train(state, plan)
        found = _measure(steps_of_run, state, directory=Path(directory), kinds=kinds, pairs=given.pairs)
        if ranks.rank == 0:
            usual = statistics.median(found[OFF])
            print(f"{OFF}: {1e3 * usual / STEPS_OF_A_TURN / ranks.world_size:.1f} ms per step and rank")
            for kind in kinds[1:]:
                pairs = zip(found[kind], found[OFF], strict=True)
                ratios = [100 * (with_it / without - 1) for with_it, without in pairs]
                low, middle, high = _interval(ratios)
                print(f"{kind}: {middle:+.2f} % ({low:+.2f} to {high:+.2f}) in {len(ratios)} pairs")


def _measure(
    steps: Iterator[Step], state: TrainState, *, directory: Path, kinds: Sequence[str], pairs: int
) -> dict[str, list[float]]:
    """Returns kind of turn -> its processor seconds on all ranks together, per pair."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    log = RunLog(every=10)
    watch, watched = (
        MemoryWatch(next(state.model.parameters()).device, log=log, steps=NEVER),
        count(WINDOW, WINDOW),
    )
    for pair in range(pairs + WARMUP_PAIRS):
        order = list(kinds)
        random.Random(pair).shuffle(order)  # noqa: S311
        for kind in order:
            every = KINDS[kind]
            observed = observe_steps(
                state.model,
                state.phase,
                log=log,
                directory=directory,
                every=every,
                # Early steps of a run are detailed.
                first_step=state.step + 1 if every == 1 else -NEVER,
            )
            with observed as observer:
                started = time.process_time()
                for _ in range(STEPS_OF_A_TURN):
                    observer.observe_step(next(steps))
                    if kind == MEMORY:
                        watch.observe_step(next(watched))
                observer.write_last()  # otherwise the last step would be read in the turn after
                took = sum(all_gather_object(time.process_time() - started))
            if pair >= WARMUP_PAIRS:
                found[kind].append(took)
    return found


def _interval(values: list[float]) -> tuple[float, float, float]:
    draw = random.Random(0)
    means = sorted(_middle_mean(draw.choices(values, k=len(values))) for _ in range(1000))
    return means[25], _middle_mean(values), means[975]


def _middle_mean(values: list[float]) -> float:
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
