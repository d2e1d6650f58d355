"""Performing a request on the ranks that a launcher started, or on ranks of our own."""

import os

from fullshard.errors import LaunchError, PlanError
from fullshard.launch.agent import run_ranks
from fullshard.launch.environment import from_slurm, under_srun, under_torchelastic, under_torchrun
from fullshard.launch.rank import perform_here
from fullshard.launch.request import Request
from fullshard.profiler.detect import may_have_gpus
from fullshard.spec.plan import DeviceType, Plan

# See `RunSection.ranks`. Two show that sharding works; more only compete for the cores.
CPU_RANKS = 2


def start(request: Request) -> int:
    """Performs `request`, and returns the exit code of the launch (see `run_ranks`).

    Under torchrun or srun, this process is one rank: it does that rank's work, and raises its errors. Whether
    a plan for another number of ranks is wrong there, only the job can decide, because nodes may have left.
    Otherwise it starts `run.ranks` ranks of its own: by default one per GPU, or two on the CPU.

    Raises PlanError or LaunchError before any rank is started, if the run cannot be laid out.
    """
    if under_srun() and not under_torchrun():
        os.environ.update(from_slurm(os.environ))
    if under_torchrun():
        if request.plan is None or not under_torchelastic():
            _check(request, ranks=int(os.environ["WORLD_SIZE"]), device=None)
        return perform_here(request)
    ranks, device = own_ranks(request)
    _check(request, ranks=ranks, device=device)
    return run_ranks(request, ranks=ranks)


def own_ranks(request: Request) -> tuple[int, DeviceType]:
    """Returns the number of ranks to start here, and their device type."""
    run, plan = request.run, request.plan
    gpus = 0 if run.run.device == "cpu" or (plan and plan.device == "cpu") else _gpus()
    if run.run.device == "cuda" and not gpus:
        raise LaunchError(
            "this machine has no CUDA device that torch can use.",
            got='run.device = "cuda"',
            fix='run.device = "cpu", or a CUDA build of torch',
        )
    device: DeviceType = "cuda" if gpus else "cpu"
    ranks = run.run.ranks or (plan.world_size if plan else gpus or CPU_RANKS)
    if gpus and ranks > gpus:
        raise LaunchError(
            f"{ranks} ranks need a GPU each.",
            got=f"run.ranks = {ranks}, {gpus} GPUs",
            why="NCCL refuses two ranks on one device",
            fix=f'run.ranks = {gpus}, or run.device = "cpu"',
        )
    return ranks, device


def _gpus() -> int:
    if not may_have_gpus():
        return 0
    import torch  # takes a second, which the check of a CPU run avoids

    return torch.cuda.device_count()


def _check(request: Request, *, ranks: int, device: DeviceType | None) -> None:
    """Raises the errors that can be found before ranks exist.

    device: None leaves the check of the device to the rank
    """
    if request.plan is None:
        Plan.from_run(request.run, world_size=ranks, device=device or "cpu")
        return
    if request.plan.world_size != ranks:
        raise PlanError(
            f"the plan is for {request.plan.world_size} ranks.",
            got=f"{ranks} ranks",
            fix=f"start {request.plan.world_size}, or make a plan for {ranks}",
        )
    if device is not None and request.plan.device != device:
        raise PlanError(f"the plan is for {request.plan.device}.", got=f"this machine has {device}")
