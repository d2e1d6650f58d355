"""Measures one item in this process.

    python -m bench.gpu.measure NAME --result FILE --work DIRECTORY [--toy]

The first steps warm up (and compile), one step shows the peak memory, then three windows of steps are timed,
and the last step is profiled. A prediction is recorded before anything is measured.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.checks import check_generate, measure_groups, measure_waits
from bench.gpu.items import ONCE, Card, Item, Kind
from bench.gpu.kernels import measure_kernels
from bench.gpu.peers import PeerLoop, plain_loop, torchtitan_loop, transformers_loop
from bench.gpu.programme_items import ITEMS, find_item
from bench.gpu.record import Figures, Record, predicted_figures
from bench.gpu.runs import RunsBench
from bench.gpu.task import RandomTokens, Task, start_training, vocabulary_of
from fullshard.errors import LaunchError, MissingExtraError, PlanError, SpecError
from fullshard.observe.clock import find_matmul_peak, total_seconds_of_calls
from fullshard.observe.memory import measure_peak_memory
from fullshard.observe.profiles import StepProfiler
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.search.search import plan as fastest_plan
from fullshard.planner.search.search import predict
from fullshard.spec.plan import Plan
from fullshard.spec.run import LogSection
from fullshard.training.loop import Step, train
from fullshard.training.shard import close_offloaded_state

NOT_AVAILABLE = (SpecError, PlanError, MissingExtraError, LaunchError, ImportError)
WARMUP_STEPS, WINDOWS = 3, 3


@dataclass(frozen=True)
class PlannedSteps:
    """The plan of the item for a number of microbatches."""

    microbatches: int
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"


def choose_plans(task: Task, *, is_peer: bool = False) -> list[PlannedSteps]:
    """Returns the planner's choice for the largest number of microbatches that fits, and the same for fewer.

    Records each prediction, and which numbers do not fit. A peer gets the settings alone if nothing fits:
    then it shows whether the planner is right. Raises SpecError for settings that this fullshard does not
    know, and PlanError if nothing fits.
    """
    item, world, hardware = task.item, task.ranks.world_size, task.hardware()
    spec = describe_run(task.load_run(max(item.microbatches)), task.device)
    best, fitting = None, list(item.microbatches)
    while best is None:
        try:
            best = fastest_plan(spec, hardware, task.load_run(fitting[-1])).run
        except PlanError as error:
            task.record.details[f"× {fitting[-1]} does not fit"] = str(error).splitlines()[1].strip()
            fitting.pop()
            if not fitting and not is_peer:
                raise
            best = None if fitting else task.load_run(1)
    found = list[PlannedSteps]()
    for count in item.microbatches if is_peer else fitting:
        batch = task.load_run(count).train.global_batch
        run = best.with_overrides([f"train.global_batch={batch}"])
        plan = predict(spec, Plan.from_run(run, world_size=world, device=task.device), hardware)
        found.append(PlannedSteps(count, plan))
        task.record.add_row(found[-1].name, predicted=predicted_figures(plan))
    plan = found[0].plan
    task.record.details |= {
        "hardware": hardware.name,
        "plan": f"{plan.strategy}, recompute {plan.run.recompute.mode}",
        "settings": run_settings(item),
    }
    task.record.save()
    return found


def run_settings(item: Item) -> list[str]:
    """Returns the item's settings without those of the model's sizes, each key once."""
    last = {one.partition("=")[0]: one for one in item.settings}
    return [text for key, text in last.items() if not key.startswith("model.")]


def measure_training(task: Task) -> None:
    """Measures fullshard's own steps."""
    planned = choose_plans(task)
    plan = planned[-1].plan
    state, loss = start_training(plan, documents=task.item.documents)
    metered = {"model": state.model, "optimizer": state.optimizer}

    def measure(one: PlannedSteps) -> None:
        with closing(cast(Generator[Step], train(state, one.plan, loss=loss))) as steps:
            measure_steps(task, one, partial(next, steps), metered=metered)

    measure_each(task, planned, measure)
    close_offloaded_state(state.model, plan=plan, finished=True)


def measure_peer(task: Task, build: Callable[[Plan, Iterator[dict[str, Tensor]]], PeerLoop]) -> None:
    """Measures a loop of `bench.gpu.peers`. Its prediction is that of fullshard with the same settings."""
    planned = choose_plans(task, is_peer=True)
    plan = planned[-1].plan
    source, rank, device = RandomTokens(vocabulary_of(plan)), task.ranks.rank, task.ranks.device
    every = (source.microbatches(step, rank=rank, plan=plan) for step in range(10**9))
    moved = (
        {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        for batch in chain.from_iterable(every)
    )
    try:
        loop = build(plan, moved)
    except torch.OutOfMemoryError as error:
        task.record.details["out of memory"] = f"before the first step: {str(error).splitlines()[0]}"
        return
    metered = {"model": loop.model, "optimizer": loop.optimizer}

    def measure(one: PlannedSteps) -> None:
        measure_steps(task, one, partial(loop.step, one.microbatches), metered=metered)

    measure_each(task, planned, measure)


def measure_each(task: Task, planned: list[PlannedSteps], measure: Callable[[PlannedSteps], None]) -> None:
    """Measures each number of microbatches, from an empty cache, up to one that is out of memory.

    That is a result, too: it stands beside what was predicted. Ranks that wait for the one that is out of
    memory would hang, so there the error is raised.
    """
    for one in planned:
        if task.device == "cuda":
            torch.cuda.empty_cache()
        try:
            measure(one)
        except torch.OutOfMemoryError as error:
            task.record.details["out of memory"] = f"{one.name}: {str(error).splitlines()[0]}"
            task.record.save()
            if task.ranks.world_size > 1:
                raise
            return


def measure_steps(
    task: Task, planned: PlannedSteps, step: Callable[[], object], *, metered: dict[str, Any]
) -> None:
    """Measures the peak memory and the seconds of a step, and records them."""
    device, plan = task.ranks.device, planned.plan
    for _ in range(WARMUP_STEPS - 1):
        step()
    with measure_peak_memory(device, **metered) as peak:
        step()
    measured: Figures = {"allocated_bytes": peak.bytes}
    if device.type == "cuda":
        measured["reserved_bytes"] = peak.reserved_bytes
    task.record.add_row(planned.name, measured=measured)
    windows = time_windows(step, device, seconds=task.window_seconds)
    task.record.add_row(planned.name, measured=speed_figures(plan, windows, device=device))
    task.record.details |= profile_details(step, device) | compiler_details()
    task.record.save()


def time_windows(step: Callable[[], object], device: torch.device, *, seconds: float) -> list[float]:
    """Returns the seconds of one step in each window. The host may run ahead of the device within one."""
    first = _slowest_rank(total_seconds_of_calls(step, 1, device=device))
    calls = max(1, min(round(seconds / first), 200))
    return [_slowest_rank(total_seconds_of_calls(step, calls, device=device) / calls) for _ in range(WINDOWS)]


def speed_figures(plan: Plan, windows: list[float], *, device: torch.device) -> Figures:
    """Returns the median step and its range, tokens/s of all ranks, and MFU if the FLOP are known."""
    seconds = statistics.median(windows)
    rate = plan.run.tokens_per_step / seconds
    found = {"step_seconds": seconds, "fastest_seconds": min(windows), "slowest_seconds": max(windows)}
    found["tokens_per_second"] = rate
    flops = plan.prediction.flops_per_token if plan.prediction is not None else None
    if flops is not None:
        peak = find_matmul_peak(device, plan.precision.param).flops_per_second
        found["mfu"] = flops * rate / (peak * plan.world_size)
    return found


def profile_details(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profiles a step: seconds by cause, and on CUDA the kernels that take most of it."""
    with tempfile.TemporaryDirectory() as directory:
        profiler = StepProfiler(
            LogSection(),
            Path(directory),
            ranks=RankInfo(dist.get_rank(), dist.get_world_size(), 0, 1, device),
            attempt=1,
            first_step=1,
            last_step=1,
            say=print,
        )
        with profiler.profile_step_to_file(1):
            step()
    causes = {} if profiler.last is None else profiler.last.terms().terms()
    shown = {name: round(1000 * seconds, 3) for name, seconds in causes.items() if seconds > 5e-7}
    found: dict[str, Any] = {"ms_by_cause": shown}
    if device.type != "cuda":
        return found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    kernels = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)[:12]
    return found | {"kernels_ms": {one.key[:90]: one.self_device_time_total / 1000 for one in kernels}}


def compiler_details() -> dict[str, Any]:
    """Returns the compiler's graphs, graph breaks and recompiles so far; empty if nothing was compiled."""
    from torch._dynamo.utils import counters

    graphs = counters["stats"].get("unique_graphs", 0)
    if not graphs:
        return {}
    breaks = sum(counters["graph_break"].values())
    return {"compiled_graphs": graphs, "graph_breaks": breaks, "recompiles": dict(counters["recompiles"])}


def run_command(task: Task, *command: str) -> None:
    """Runs a module of this environment in a process of its own, and records the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, flush=True)
    task.record.details |= {"exit_code": done.returncode, "output": done.stdout.splitlines()[-25:]}
    task.record.save()
    if done.returncode not in (0, 5):  # 5: pytest has collected nothing
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")


def calibrate(task: Task) -> None:
    """Runs `fullshard calibrate`, and leaves its hardware.toml beside the results."""
    seconds, out = ("2" if task.is_toy else "36"), task.work / "hardware.toml"
    options = ("--device", task.device, "--seconds", seconds, "--out", str(out), "--drive", str(task.work))
    run_command(task, "fullshard", "calibrate", "--ranks", str(task.asked_ranks), *options)


def measure_runs(task: Task) -> None:
    """Runs the item's variants, and compares them."""
    RunsBench(task.record, task.work, task.item.settings, task.is_toy).measure(task.item.variants)


def run_cuda_tests(task: Task) -> None:
    """Runs the tests that need a CUDA device. Without one, pytest skips them."""
    # Only the files that have such tests: to collect all takes a minute.
    files = (str(one) for one in Path("tests").rglob("test_*.py") if "no CUDA device" in one.read_text())
    run_command(task, "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *sorted(files))


def measure_kernel_rates(task: Task) -> None:
    with process_group(task.device) as ranks:
        measure_kernels(task.record, task.hardware(), device=ranks.device)


KINDS: dict[Kind, Callable[[Task], None]] = {
    "kernels": measure_kernel_rates,
    "train": measure_training,
    "plain": partial(measure_peer, build=plain_loop),
    "transformers": partial(measure_peer, build=transformers_loop),
    "torchtitan": partial(measure_peer, build=torchtitan_loop),
    "calibrate": calibrate,
    "tests": run_cuda_tests,
    "runs": measure_runs,
    "waits": measure_waits,
    "generate": check_generate,
    "groups": measure_groups,
}


def measure_item(task: Task) -> None:
    """Measures the item. What this installation or machine lacks is recorded; other errors are raised."""
    try:
        KINDS[task.item.kind](task)
    except NOT_AVAILABLE as error:
        task.record.unavailable = str(error)
    task.record.save()


def _slowest_rank(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[item.name for item in ITEMS])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--card", choices=get_args(Card), default="h200")
    parser.add_argument("--ranks", type=int, default=1, help="of the kinds that start their own")
    asked = parser.parse_args()
    item = find_item(asked.name, card=asked.card, is_toy=asked.toy)
    if item.kind in ONCE:
        # Without a context on a GPU, whose memory the item's own processes need.
        device = torch.device("cuda" if torch.cuda.is_available() and not asked.toy else "cpu")
        alone = RankInfo(0, 1, 0, 1, device)
        measure_item(Task(item, alone, Record(asked.result), asked.work, asked.toy, asked.ranks))
        return
    with process_group("cpu" if asked.toy else "auto") as ranks:
        record = Record(asked.result, writes=ranks.rank == 0)
        measure_item(Task(item, ranks, record, asked.work, asked.toy, ranks.world_size))


if __name__ == "__main__":
    main()
