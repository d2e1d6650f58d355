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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.items import ITEMS, Item, Kind, toy
from bench.gpu.kernels import measure_kernels
from bench.gpu.peers import PeerLoop, plain_loop, torchtitan_loop, transformers_loop
from bench.gpu.record import Figures, Record, predicted_figures
from bench.gpu.split_kernels import (
    measure_context_parallel,
    measure_grouped_matmuls,
    measure_tensor_parallel,
)
from fullshard.data.build import build_data
from fullshard.errors import LaunchError, MissingExtraError, PlanError, SpecError
from fullshard.launch.detect import detect_hardware
from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss
from fullshard.observe.clock import find_matmul_peak, total_seconds_of_calls
from fullshard.observe.memory import measure_peak_memory
from fullshard.observe.profiles import StepProfiler
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.offload import with_infinitely_fast_drive
from fullshard.planner.search.search import plan as fastest_plan
from fullshard.planner.search.search import predict
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import LogSection, Run
from fullshard.training.loop import Step, train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import close_offloaded_state, shard
from fullshard.training.state import TrainState

NOT_AVAILABLE = (SpecError, PlanError, MissingExtraError, LaunchError, ModuleNotFoundError)
WARMUP_STEPS, WINDOWS = 3, 3


@dataclass(frozen=True)
class Task:
    """An item, the ranks that measure it, where its figures go, and a directory for files of the run."""

    item: Item
    ranks: RankInfo
    record: Record
    work: Path
    is_toy: bool

    @property
    def device(self) -> DeviceType:
        return "cuda" if self.ranks.device.type == "cuda" else "cpu"

    @property
    def window_seconds(self) -> float:
        """Approximate duration of one of the timed windows."""
        return 0.1 if self.is_toy else 2.0

    def hardware(self) -> Hardware:
        found = detect_hardware(self.device, ranks=self.ranks.world_size)
        return found if found.disk_bytes_per_second is not None else with_infinitely_fast_drive(found)


@dataclass(frozen=True)
class PlannedSteps:
    """The plan of the item for a number of microbatches."""

    microbatches: int
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"


class RandomTokens:
    """Microbatches of random tokens, made on the host as a loader's are."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step * plan.world_size + rank)
        shape = (plan.microbatch, plan.run.data.sequence_length + 1)
        for _ in range(plan.accumulation):
            tokens = torch.randint(self.vocabulary, shape, generator=generator)
            yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def choose_plans(task: Task) -> list[PlannedSteps]:
    """Returns the planner's choice for the largest number of microbatches, and the same plan for all numbers.

    Records each prediction. Raises SpecError for settings that this fullshard does not know, and PlanError if
    nothing fits.
    """
    item, world = task.item, task.ranks.world_size
    where = f"run.dir={task.work / 'run'}"

    def batch(count: int) -> str:
        return f"train.global_batch={count * world}"

    hardware = task.hardware()
    asked = Run.load(overrides=[*item.settings, where, batch(max(item.microbatches))])
    spec = describe_run(asked, task.device)
    best = fastest_plan(spec, hardware, asked)
    found = list[PlannedSteps]()
    for count in item.microbatches:
        run = best.run.with_overrides([batch(count)])
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
    model = build_model(plan.run)
    loss, vocabulary = choose_loss(plan.run, model), vocabulary_of(plan)
    model = shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=RandomTokens(vocabulary))
    metered = {"model": model, "optimizer": state.optimizer}
    for one in planned:
        with closing(cast(Generator[Step], train(state, one.plan, loss=loss))) as steps:
            measure_steps(task, one, partial(next, steps), metered=metered)
    close_offloaded_state(model, plan=plan, finished=True)


def measure_peer(task: Task, build: Callable[[Plan, Iterator[dict[str, Tensor]]], PeerLoop]) -> None:
    """Measures a loop of `bench.gpu.peers`. Its prediction is that of fullshard with the same settings."""
    planned = choose_plans(task)
    plan = planned[-1].plan
    source, rank, device = RandomTokens(vocabulary_of(plan)), task.ranks.rank, task.ranks.device
    every = (source.microbatches(step, rank=rank, plan=plan) for step in range(10**9))
    moved = ({key: value.to(device) for key, value in batch.items()} for batch in chain.from_iterable(every))
    loop = build(plan, moved)
    for one in planned:
        step = partial(loop.step, one.microbatches)
        measure_steps(task, one, step, metered={"model": loop.model, "optimizer": loop.optimizer})


def vocabulary_of(plan: Plan) -> int:
    """Returns the number of tokens of the run's model."""
    head: Any = build_model(plan.run)
    return head.get_output_embeddings().out_features


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


def measure_losses(task: Task) -> None:
    """Trains on the standard library's source, and records the losses."""
    [planned] = choose_plans(task)
    run = planned.plan.run
    model = build_model(run)
    loss = choose_loss(run, model)
    model = shard(model, planned.plan)
    state = TrainState(model, build_optimizer(model, planned.plan), data=build_data(run))
    losses = list[float]()
    for step in train(state, planned.plan, loss=loss):
        losses.append(step.loss)
        if step.index % 10 == 0 or step.index == run.train.steps:
            task.record.details["losses"] = [round(one, 4) for one in losses]
            last = losses[-20:]
            task.record.add_row(planned.name, measured={"last_loss": sum(last) / len(last)})


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
    ranks = str(task.ranks.world_size)
    run_command(task, "fullshard", "calibrate", "--ranks", ranks, *options)


def run_cuda_tests(task: Task) -> None:
    """Runs the tests that need a CUDA device. Without one, pytest skips them."""
    run_command(task, "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests")


def measure_on_device(task: Task, *, measure: Callable[..., None]) -> None:
    measure(task.record, task.hardware(), device=task.ranks.device)


KERNELS: dict[Kind, Callable[..., None]] = {
    "kernels": measure_kernels,
    "tensor_parallel": measure_tensor_parallel,
    "grouped_matmuls": measure_grouped_matmuls,
    "context_parallel": measure_context_parallel,
}
KINDS: dict[Kind, Callable[[Task], None]] = {
    **{kind: partial(measure_on_device, measure=measure) for kind, measure in KERNELS.items()},
    "train": measure_training,
    "losses": measure_losses,
    "plain": partial(measure_peer, build=plain_loop),
    "transformers": partial(measure_peer, build=transformers_loop),
    "torchtitan": partial(measure_peer, build=torchtitan_loop),
    "calibrate": calibrate,
    "tests": run_cuda_tests,
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
    asked = parser.parse_args()
    item = next(item for item in ITEMS if item.name == asked.name)
    item = toy(item) if asked.toy else item
    with process_group("cpu" if asked.toy else "auto") as ranks:
        record = Record(asked.result, writes=ranks.rank == 0)
        measure_item(Task(item, ranks, record, asked.work, asked.toy))


if __name__ == "__main__":
    main()
