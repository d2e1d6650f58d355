"""`python -m tests.training.resident JOB DIR [SECTION.KEY=VALUE …]`: ranks that watch their own memory.

`measured` trains for some steps; `limited` is the whole of `fullshard train`, and ends at a hard limit of
address space. Both count from what a process has after its imports, and leave what they saw in DIR.
"""

import gc
import json
import os
import resource
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.launch.command import performed

# Of 20 equal blocks of 3 million parameters, of a few tokens: the state is all there is.
MANY_LAYERS = (
    *("model.d_model=512", "model.heads=8", "model.d_ff=1536", "model.vocabulary=256"),
    *("model.layers=20", "data.sequence_length=32", "sharding.strategy=full_shard"),
    *("precision.mode=fp32", "recompute.mode=none", "offload.sub_group_parameters=1000000"),
    *("offload.host_bytes=1000000000", "train.microbatch=1", "run.device=cpu"),
)
STEPS = 4
# What the whole command has beside a model, in address space: data and imports 80 MB, the memory meter 50,
# and 8 for the stack of each thread.
BESIDE_BYTES = 300_000_000


def measured(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Bytes that are planned, and the most that were resident over those after the imports."""
    import torch

    from fullshard.models.decoder import DecoderModel
    from fullshard.parallel.mesh import process_group
    from fullshard.training.loop import train
    from fullshard.training.optimizer import build_optimizer
    from fullshard.training.shard import shard
    from fullshard.training.state import TrainState

    def batches() -> Iterator[dict[str, Any]]:
        for step in count():
            tokens = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(step))
            yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    with process_group("cpu") as ranks:
        plan = Plan.from_run(run, world_size=ranks.world_size)
        planned = planned_bytes(plan)
        with torch.device("meta"):
            model = DecoderModel(run.decoder_config)
        base = settled()
        shard(model, plan)
        state = TrainState(model, build_optimizer(model, plan), data=batches())
        steps = train(state, plan)
        for _ in range(STEPS):
            next(steps)
        state.wait_for_updates()
        peak = status("VmHWM") - base
        parameters = sum(p.numel() for p in model.parameters())
        leave(run, ranks.rank, state=16 * parameters, planned=planned, peak=peak)


def limited(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """`RESIDENT_LIMIT` bytes of address space more than after the imports, and not one more; unset: any."""
    from fullshard.jobs.train import run_job

    base, space, limit = settled(), status("VmSize"), os.environ.get("RESIDENT_LIMIT")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (space + int(limit), space + int(limit)))
    run_job(run, resume=resume, plan=plan, command_started=command_started)
    leave(
        run, int(os.environ["RANK"]), peak=status("VmHWM") - base, space=status("VmPeak") - space, ended=True
    )


def limit_of(tier: str, *sizes: str, ranks: int) -> int:
    """Bytes of address space over those after the imports in which the whole command must find room."""
    settings = [f"offload.tier={tier}", f"train.global_batch={ranks}"]
    plan = Plan.from_run(Run.load(overrides=[*MANY_LAYERS, *sizes, *settings]), world_size=ranks)
    return int(1.1 * planned_bytes(plan)) + BESIDE_BYTES


def planned_bytes(plan: Plan) -> int:
    """Predicted bytes of a rank's device and host; a CPU rank needs both."""
    import torch

    from fullshard.models.decoder import DecoderModel
    from fullshard.models.loss import next_token_loss
    from fullshard.planner.describe.describe import describe
    from fullshard.planner.search.search import predict
    from tests.fakes.hardware import cpu_of

    with torch.device("meta"):
        model = DecoderModel(plan.run.decoder_config)
    hardware = cpu_of(plan.world_size).model_copy(update={"disk_bytes_per_second": 1e9})
    found = predict(describe(model, plan, loss=next_token_loss), plan, hardware).prediction
    assert found is not None
    return found.memory.total + (found.offload.host_bytes if found.offload else 0)


def settled() -> int:
    """Resident bytes now, from where on the peak is counted: what torch makes at a first use is there."""
    import torch
    from torch import nn

    layer = nn.Linear(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """Bytes that Linux reports for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def leave(run: Run, rank: int, **seen: int) -> None:
    Path(run.run.dir).mkdir(exist_ok=True)
    Path(f"{run.run.dir}-{rank}.json").write_text(json.dumps(seen))


def main(job: str, directory: str, *settings: str) -> int:
    run = Run.load(overrides=[*MANY_LAYERS, f"run.dir={directory}", *settings])
    return performed({"run": run, "job": f"tests.training.resident:{job}"})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
