"""Running a request's job on ranks that torchrun or srun started, or on ranks that fullshard starts."""

import os

from fullshard.errors import LaunchError
from fullshard.launch.agent import run_attempts
from fullshard.launch.detect import may_have_gpus
from fullshard.launch.environment import prepare_rank_environment
from fullshard.launch.rank import perform_as_torchrun_rank
from fullshard.launch.request import LaunchRequest
from fullshard.spec.plan import DeviceType

# See `RunSetupSection.ranks`. Two show that sharding works; more only compete for the cores.
CPU_RANKS = 2


def perform_request(request: LaunchRequest) -> int:
    """Runs the job of `request` on all ranks, and returns the exit code of the launch (see `run_attempts`).

    Under torchrun or srun, this process is one rank: it calls the job itself, and raises its errors.
    Otherwise it starts ranks on this machine (see `choose_rank_count_and_device`).
    """
    if prepare_rank_environment():
        return perform_as_torchrun_rank(request)
    return run_attempts(request, ranks=choose_rank_count_and_device(request)[0])


def choose_rank_count_and_device(request: LaunchRequest) -> tuple[int, DeviceType]:
    """Returns the number of ranks to start on this machine, and their device type.

    The number is `run.ranks`, else the plan's, else one per GPU, or two on the CPU. Raises LaunchError for
    more ranks than GPUs, or if CUDA is required but missing.
    """
    run, plan = request.run, request.plan
    gpus = 0
    if run.run.device != "cpu" and not (plan and plan.device == "cpu") and may_have_gpus():
        import torch  # takes a second, which the check of a CPU run avoids

        gpus = torch.cuda.device_count()
    if run.run.device == "cuda" and not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        raise LaunchError(
            "this machine has no CUDA device that torch can use.",
            got=f'run.device = "cuda"{", CUDA_VISIBLE_DEVICES is empty" if hidden else ""}',
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
