"""A rank that runs out of memory leaves a report: what it held, beside what was planned."""

import errno
import gc
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import TrainError
from fullshard.jobs.checks.machine import MachineAccess
from fullshard.jobs.out_of_memory import (
    OutOfMemoryReporter,
    format_held_bytes,
    is_out_of_memory,
    requested_bytes,
)
from fullshard.jobs.train import run_job
from fullshard.models.loss import next_token_loss
from fullshard.parallel.mesh import RankInfo
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS, OUT_OF_MEMORY
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker
from tests.fakes.machines import context_of
from tests.jobs.test_train import TINY

MIB = 1 << 20
# 4 sequences of 512 on each rank: activations of over 32 MiB.
WIDE = ("data.sequence_length=512", "model.max_sequence=512", "model.d_ff=512", "train.steps=4")


ballast: list[torch.Tensor] = []


def loss_in_little_memory(model: nn.Module, batch: Any) -> Any:
    """The loss, on rank 1 with 8 MiB more than the process has in use."""
    if dist.get_rank() == 1:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + 8 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        with suppress(RuntimeError):  # what tests before have freed is used up
            while True:
                ballast.append(torch.empty(MIB, dtype=torch.uint8))
        del ballast[-8:]
    return next_token_loss(model, batch)


def train_in_little_memory(directory: str) -> None:
    own = (*WIDE, "train.loss=tests.jobs.test_out_of_memory:loss_in_little_memory", f"run.dir={directory}")
    run = Run.load(overrides=[*TINY, *own])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    try:
        run_job(plan.run, resume=False, plan=plan, command_started=time.time())
    finally:
        ballast.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_rank_out_of_memory_writes_a_report(ranks, tmp_path: Path):
    with pytest.raises(TrainError, match=r"^rank 1 ran out of memory in ") as raised:
        ranks(2).run(train_in_little_memory, str(tmp_path / "run"))
    [path] = (tmp_path / "run" / OUT_OF_MEMORY).glob("step-*-rank-00001.txt")
    assert str(path) in str(raised.value)
    assert "activations, rest" in path.read_text()
    [event] = [one for one in read_events(tmp_path / "run" / EVENTS) if one.event == "out_of_memory"]
    assert (event.details["rank"], event.details["path"]) == (1, str(path))
    assert event.details["held_bytes"] > 0
    assert event.details["requested_bytes"] > 0
    assert path.name.startswith(f"step-{event.step:08}-")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes.", 4 * MIB),
        ("std::bad_alloc", None),
    ],
)
def test_the_messages_of_allocators_are_understood(message: str, size: int | None):
    assert is_out_of_memory(RuntimeError(message))
    assert requested_bytes(message) == size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_out_of_memory_leaves_a_report(tmp_path: Path):
    ranks = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cuda", 0))
    reporter = OutOfMemoryReporter(ranks, where=PhaseTracker())
    reporter.directory = tmp_path
    with pytest.raises(TrainError, match="rank 0 ran out of memory"), reporter:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "1.00 PiB more" in (tmp_path / OUT_OF_MEMORY / "step-00000001-rank-00000.txt").read_text()


def test_a_report_replaces_a_link_in_its_place(tmp_path: Path):
    (target := tmp_path / "precious").write_text("x")
    (path := tmp_path / OUT_OF_MEMORY / "step-00000001-rank-00000.txt").parent.mkdir()
    path.symlink_to(target)
    reporter = OutOfMemoryReporter(
        RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu")),
        where=PhaseTracker(),
    )
    reporter.directory = tmp_path
    with pytest.raises(TrainError, match="rank 0 ran out of memory"), reporter:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert (target.read_text(), path.is_symlink()) == ("x", False)
    assert "1.00 EiB" in path.read_text() or "1024.00 PiB" in path.read_text()


def test_other_errors_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    caused = TrainError("it ended")
    caused.__cause__ = MemoryError()
    assert is_out_of_memory(caused)


def test_report_distinguishes_need_and_availability():
    planned = context_of(MachineAccess()).plan.prediction
    assert planned is not None
    total = planned.memory.total
    less = format_held_bytes({"parameter_shards": 9}, total=total // 2, requested=1, prediction=planned)
    assert "Less was available than planned" in less
    more = format_held_bytes({}, total=2 * total, requested=None, prediction=planned)
    assert "More was needed than planned" in more
