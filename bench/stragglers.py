"""Measures how often a rank that holds the others up is named, with its cause, in a small training.

    torchrun --nproc-per-node 4 bench/stragglers.py [--trials 20] [--clean 20] [--seed 1] [--json]

In each window of steps, at most one rank is delayed by 100 to 200 ms per step, for one cause. Prints for each
cause how often the right rank and cause were named, nothing, or anything else. `chrt -r 1` before the command
keeps other programs off the cores. The thresholds are those of `fullshard.observe.stragglers`; the seeds are
not those with which these were chosen.
"""

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.ranges import OwnWorkClock, run_own_clock
from fullshard.observe.run_log import RunLog
from fullshard.observe.stragglers import StragglerCause, StragglerWatch
from fullshard.parallel.mesh import process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

WINDOW = 4
WARMUP_WINDOWS = 3
SETTINGS = (
    "sharding.strategy=full_shard",
    "train.global_batch=16",
    "data.sequence_length=4",
    "train.steps=1000000",
    "schedule.warmup_steps=1",
    "optimizer.learning_rate=1e-4",
    "precision.mode=fp32",
)
Injection = tuple[int, StragglerCause, float] | None  # rank, cause, seconds per step


@dataclass
class Delay:
    """The delay of this rank in the current step.

    simulated_ns: a clock of this rank that delays advance, and nothing else; None: they take their time
    """

    cause: StragglerCause | None = None
    seconds: float = 0.0
    garbage: list[list[int]] = field(default_factory=list[list[int]])
    simulated_ns: int | None = None

    def now(self) -> int:
        """The simulated clock, or the host's, in ns."""
        return time.perf_counter_ns() if self.simulated_ns is None else self.simulated_ns

    def burn(self, cause: StragglerCause) -> None:
        """Computes for the delay's processor time, if it is for `cause`."""
        if self.cause is cause and not self._is_simulated():
            end = time.thread_time() + self.seconds
            a = torch.randn(64, 64)
            while time.thread_time() < end:
                a = torch.mm(a, a).tanh()

    def sleep(self, cause: StragglerCause) -> None:
        if self.cause is cause and not self._is_simulated():
            time.sleep(self.seconds)

    def _is_simulated(self) -> bool:
        """Advances the simulated clock by the delay, if there is one."""
        if self.simulated_ns is not None:
            self.simulated_ns += round(self.seconds * 1e9)
        return self.simulated_ns is not None


class Layers(nn.Module):
    """x (rows, 64) -> (rows, 1), with a place for each delay."""

    def __init__(self, delay: Delay) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)
        self.delay = delay

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.delay.burn(StragglerCause.FORWARD)
        if self.delay.cause is StragglerCause.GARBAGE:
            gc.collect()
        out = self.head(x)
        out.register_hook(lambda _: self.delay.burn(StragglerCause.BACKWARD))
        return out


class Rows:
    """A batch of random rows."""

    def __init__(self, delay: Delay) -> None:
        self.delay = delay

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(step * 64 + rank)
        for _ in range(plan.accumulation):
            self.delay.sleep(StragglerCause.DATA)
            yield torch.randn(plan.microbatch, 64, generator=generator)


def run_windows(
    schedule: Sequence[Injection], *, settings: Sequence[str] = SETTINGS, simulated: bool = False
) -> list[list[tuple[int, str]]]:
    """Returns (rank, cause) of what was named in each window of `schedule`. Collective.

    simulated: delays pass on a clock of each rank, on which nothing else takes time; for phases of a step
    """
    delay, rank = Delay(simulated_ns=0 if simulated else None), dist.get_rank()
    plan = Plan.from_run(Run.load(overrides=list(settings)), world_size=dist.get_world_size(), device="cpu")
    with torch.device("meta"):
        model = Layers(delay)
    shard(model, plan)
    optimizer = build_optimizer(model, plan)
    optimizer.register_step_pre_hook(lambda *_: delay.burn(StragglerCause.OPTIMIZER))
    state = TrainState(model, optimizer, data=Rows(delay))
    state.phase = PhaseTracker()
    named: list[list[tuple[int, str]]] = []
    with run_own_clock(OwnWorkClock(delay.now) if simulated else None) as clock:
        state.phase.clock = clock
        watch = StragglerWatch(clock, log=RunLog(every=WINDOW), device=torch.device("cpu"))
        steps = train(state, plan, loss=lambda m, x: m(x).square().mean())
        padded = [None] * WARMUP_WINDOWS + list(schedule) + [None]
        for number in range(1, len(padded) * WINDOW + 2):
            now = padded[min((number - 1) // WINDOW, len(padded) - 1)]
            _set_delay(delay, now if now is not None and now[0] == rank else None)
            step = next(steps)
            state.phase.enter(RunPhase.SAVING)
            delay.sleep(StragglerCause.SAVING)
            all_gather_object(None)
            state.phase.enter(RunPhase.BETWEEN_STEPS)
            stragglers = watch.observe_step(step.index)
            if stragglers is not None:
                named.append([(one.rank, str(one.cause)) for one in stragglers])
    return named[WARMUP_WINDOWS : WARMUP_WINDOWS + len(schedule)]


def _set_delay(delay: Delay, injection: Injection) -> None:
    before = delay.cause
    delay.cause, delay.seconds = (None, 0.0) if injection is None else injection[1:]
    if delay.cause is StragglerCause.GARBAGE and before is not StragglerCause.GARBAGE:
        delay.garbage = _garbage(delay.seconds)
    elif delay.cause is not StragglerCause.GARBAGE:
        delay.garbage = []


def _garbage(seconds: float) -> list[list[int]]:
    """Returns living objects that a collection needs `seconds` to look at."""
    made: list[list[int]] = []
    took = 0.0
    while took < seconds:
        made += [[i] for i in range(50_000)]
        started = time.thread_time()
        gc.collect()
        took = time.thread_time() - started
    return made


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--trials", type=int, default=20, help="windows of each cause (20)")
    asked.add_argument("--clean", type=int, default=20, help="windows without a delay (20)")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--json", action="store_true")
    given = asked.parse_args()
    torch.set_num_threads(1)
    with process_group("cpu") as ranks:
        draw = random.Random(given.seed)
        schedule: list[Injection] = [None] * given.clean
        schedule += [
            (draw.randrange(ranks.world_size), cause, draw.uniform(0.1, 0.2))
            for cause in StragglerCause
            for _ in range(given.trials)
        ]
        draw.shuffle(schedule)
        gc.freeze()
        started = time.perf_counter()
        named = run_windows(schedule)
        if ranks.rank == 0:
            seconds = (time.perf_counter() - started) / (len(schedule) + WARMUP_WINDOWS) / WINDOW
            print(json.dumps(_counts(schedule, named)) if given.json else _page(schedule, named, seconds))


def _counts(
    schedule: Sequence[Injection], named: Sequence[list[tuple[int, str]]]
) -> dict[str, dict[str, int]]:
    """Returns cause -> outcome -> number of windows; `none` are the windows without a delay."""
    counts: dict[str, Counter[str]] = {}
    for injected, found in zip(schedule, named, strict=True):
        cause = "none" if injected is None else str(injected[1])
        right = [] if injected is None else [(injected[0], cause)]
        outcome = "right" if found == right else "nothing" if not found else "wrong"
        counts.setdefault(cause, Counter())[outcome] += 1
    return {cause: dict(one) for cause, one in counts.items()}


def _page(schedule: Sequence[Injection], named: Sequence[list[tuple[int, str]]], seconds: float) -> str:
    lines = ["| injected | windows | right | nothing named | something else named |", "|---|---|---|---|---|"]
    for cause, one in sorted(_counts(schedule, named).items()):
        total = sum(one.values())
        lines.append(
            f"| {cause} | {total} | {one.get('right', 0)} | {one.get('nothing', 0)} | {one.get('wrong', 0)} |"
        )
    others = [
        f"{injected and (injected[0], str(injected[1]), round(injected[2], 3))}: named {found}"
        for injected, found in zip(schedule, named, strict=True)
        if found != ([] if injected is None else [(injected[0], str(injected[1]))])
    ]
    return "\n".join([*lines, "", f"{seconds:.3f} s per step", *others])


if __name__ == "__main__":
    main()
