"""Each rank's memory is in the records of its run; a rank that leaks is named, and no other."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.jobs.train import run_job
from fullshard.models.loss import next_token_loss
from fullshard.observe.live_memory import LiveMemoryMeter, allocator_figures
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS, METRICS
from fullshard.spec.run import Run
from tests.jobs.test_train import TINY

MIB = 1 << 20
KEPT: list[Tensor] = []


def leaking_loss(model: nn.Module, batch: Any) -> Any:
    """Keeps 1 MiB of each microbatch on rank 1, of which each step of TINY has one."""
    if dist.get_rank() == 1:
        KEPT.append(torch.ones(MIB // 4))
    return next_token_loss(model, batch)


def train(directory: str, settings: tuple[str, ...]) -> None:
    run = Run.load(overrides=[*TINY, "log.trace_every=0", f"run.dir={directory}", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())
    KEPT.clear()


def test_a_leak_of_a_mebibyte_per_step_is_named_within_100_steps(ranks, tmp_path: Path):
    loss = "train.loss=tests.observe.test_memory_watch:leaking_loss"
    ranks(2).run(train, str(tmp_path / "run"), ("train.steps=100", loss))
    leaks = [one for one in read_events(tmp_path / "run" / EVENTS) if one.event == "leak"]
    assert [(one.details["rank"], one.details["memory"]) for one in leaks] == [(1, "host memory")]
    assert leaks[0].details["bytes_per_step"] == pytest.approx(MIB, rel=0.1)


def test_a_run_without_a_leak_names_none_and_records_its_memory(ranks, tmp_path: Path):
    settings = ("train.steps=100", "checkpoint.every=30", "train.validate_every=25")
    ranks(2).run(train, str(tmp_path / "run"), settings)
    assert not [one for one in read_events(tmp_path / "run" / EVENTS) if one.event == "leak"]
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert all(0 < line["host_bytes"] < line["resident_bytes"] for line in lines)


def test_live_bytes_are_those_of_the_tensors_that_are_kept():
    before = LiveMemoryMeter(torch.device("cpu")).read()
    kept = torch.ones(8 * MIB)
    after = LiveMemoryMeter(torch.device("cpu")).read()
    assert after["host_bytes"] - before["host_bytes"] == pytest.approx(kept.nbytes, rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_the_live_bytes_and_the_peak_of_each_step():
    meter = LiveMemoryMeter(torch.device("cuda", 0))
    before = meter.read()["allocated_bytes"]
    kept = torch.ones(8 * MIB, device="cuda")
    torch.ones(16 * MIB, device="cuda")  # freed at once
    during, after = meter.read(), meter.read()
    assert during["allocated_bytes"] - before == kept.nbytes
    assert during["peak_allocated_bytes"] - before == 3 * kept.nbytes
    assert after["peak_allocated_bytes"] == after["allocated_bytes"] == during["allocated_bytes"]


def test_figures_of_the_allocator_are_read_from_its_statistics():
    stats = {
        "allocated_bytes": {"all": {"current": 60, "peak": 90}},
        "reserved_bytes": {"all": {"current": 100, "peak": 110}},
        "inactive_split_bytes": {"all": {"current": 25}},
        "num_alloc_retries": 2,
    }
    assert allocator_figures(stats) == {
        "allocated_bytes": 60,
        "reserved_bytes": 100,
        "peak_allocated_bytes": 90,
        "peak_reserved_bytes": 110,
        "allocator_retries": 2,
        "fragmentation": 0.25,
    }
    assert allocator_figures({})["fragmentation"] == 0.0, "before the first allocation"
