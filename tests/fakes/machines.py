"""Machines and runs for the checks before a run: a quiet one, and what differs from it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.jobs.checks.machine import MachineAccess, RunContext
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, Prediction, TimeTerms
from fullshard.spec.run import Run

GIB = 1 << 30
SMI = "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |"
TORCH = "cuda: Optional[str] = '12.4'\n"
HEALTHY = "0, 0, 41, 700.00, 700.00, Not Active\n1, 0, 43, 700.00, 700.00, Not Active\n"


def quiet_machine(root: Path) -> MachineAccess:
    """Two cores, enough of everything, no GPU."""
    return MachineAccess(
        environment={},
        root=root,
        run_command=lambda command: None,
        torch_version_file=lambda: TORCH,
        can_resolve=lambda host: True,
        space_bytes=lambda path: (1000 * GIB, 500 * GIB),
        usable_cores=lambda: 2,
    )


def gpu_machine(root: Path, **answers: str) -> MachineAccess:
    """A quiet machine with two healthy GPUs; `answers` replaces what nvidia-smi prints (plain, health, …)."""
    printed = {"plain": SMI, "health": HEALTHY, "processes": "", **answers}

    def run_command(command: Sequence[str]) -> str | None:
        text = " ".join(command)
        kinds = {"query-gpu": "health", "compute-apps": "processes"}
        return printed[next((kind for part, kind in kinds.items() if part in text), "plain")]

    return replace(quiet_machine(root), run_command=run_command)


def write_files(root: Path, **texts: str) -> Path:
    """Writes files below `root`; `__` in a name stands for `/`. Returns `root`."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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
