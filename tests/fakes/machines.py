"""Machines and runs for the checks before a run: a quiet one, and what differs from it."""

from pathlib import Path
from typing import Any

from fullshard.jobs.checks.machine import MachineAccess, RunContext
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, Prediction, TimeTerms
from fullshard.spec.run import Run

GIB = 1 << 30


def quiet_machine(root: Path) -> MachineAccess:
    """Two cores, enough of everything, no GPU."""
    return MachineAccess(
        environment={},
        root=root,
        free_bytes=lambda path: 500 * GIB,
        usable_cores=lambda: 2,
    )


def gpu_machine(root: Path) -> MachineAccess:
    """A quiet machine with two GPUs."""
    for name in ("0000:01", "0000:02"):
        (root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (root / "dev/shm").mkdir(parents=True)
    return quiet_machine(root)


def context_of(machine: MachineAccess, *settings: str, ranks: int = 2, **plan: Any) -> RunContext:
    """The default run on `machine`, with a prediction of 2 GiB per rank, of which 1 GiB is saved."""
    made = Plan.from_run(Run.load(overrides=settings), world_size=ranks)
    memory = MemoryTerms.model_validate(
        {name: 0 for name, field in MemoryTerms.model_fields.items() if field.is_required()} | {"moment": ""}
    ).model_copy(update={"parameter_shards": GIB // 2, "optimizer_state": GIB // 2})
    time = TimeTerms.model_validate(
        {name: 0 for name, f in TimeTerms.model_fields.items() if f.is_required()}
    )
    prediction = Prediction(
        hardware="fake",
        memory=memory,
        allocator_reserve_bytes=GIB,
        capacity_bytes=8 * GIB,
        time=time,
        tokens_per_step=1,
        tokens_per_second=1.0,
    )
    return RunContext(made.model_copy(update={"prediction": prediction, **plan}), machine)
