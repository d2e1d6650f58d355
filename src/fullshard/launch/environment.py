"""The launcher of this process, and the environment that must be set before torch is imported."""

import getpass
import os
import re
from collections.abc import Mapping, MutableMapping

from fullshard.errors import LaunchError
from fullshard.system.process import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, count_cores_of_rank

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LEFTOVER = (*_TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if torchrun, or a compatible launcher, has started this process as a rank.

    Also True for a task of srun after `set_torchrun_variables_of_srun_task`, which each command calls first.
    """
    return all(name in environment for name in _TORCHRUN)


def is_started_by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if this process is one of several tasks of a SLURM job step.

    False in a batch script, and in the shell of `srun --pty`, of which only the first task has the terminal.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    is_task = "SLURM_PROCID" in environment and "SLURM_PTY_PORT" not in environment
    return is_task and tasks.isdecimal() and int(tasks) > 1


def drop_leftover_torchrun_variables(environment: MutableMapping[str, str]) -> None:
    """Removes variables of a launcher that did not start this process, which another job left in the shell.

    A process with a RANK may have been started by one: `prepare_environment_if_started_as_rank` checks its
    variables.
    """
    if not is_started_by_srun(environment) and "RANK" not in environment:
        for name in [one for one in environment if one in _LEFTOVER or one.startswith("TORCHELASTIC_")]:
            del environment[name]


def set_torchrun_variables_of_srun_task(environment: MutableMapping[str, str]) -> None:
    """Sets torchrun's variables if srun started this process as one of several tasks, unless they are set.

    Raises LaunchError if a variable of SLURM is not a number.
    """
    if is_started_by_srun(environment) and not is_started_by_torchrun(environment):
        try:
            environment.update(torchrun_variables_from_slurm(environment))
        except ValueError as error:
            what = "SLURM's variables are not those of a task of srun."
            raise LaunchError(what, got=str(error), fix="srun … fullshard, which sets them") from error


def prepare_environment_if_started_as_rank(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Sets log levels, threads, allocator and (under srun) torchrun's variables, before a rank imports torch.

    Returns False, and sets nothing, if neither torchrun nor srun started this process as a rank. Raises
    LaunchError if only some of a rank's variables are set, or if they are not numbers of a rank.
    """
    set_torchrun_variables_of_srun_task(environment)
    if "RANK" not in environment:
        return False
    check_rank_variables(environment)
    set_default_log_levels(environment)
    set_default_omp_threads(environment)
    set_default_allocator(environment)
    return True


def check_rank_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raises LaunchError if only some of a rank's variables are set, or if they are not numbers of a rank."""
    missing = [name for name in _TORCHRUN if name not in environment]
    numbers = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    is_valid = all(map(str.isdecimal, numbers.values())) and int(numbers["RANK"]) < int(numbers["WORLD_SIZE"])
    if missing or not is_valid:
        shown = ", ".join(f"{name}={environment[name]}" for name in _TORCHRUN if name in environment)
        raise LaunchError(
            "the environment is that of a rank, but not whole."
            if missing
            else "the environment is of no rank.",
            got=f"{shown}; without {', '.join(missing)}" if missing else shown,
            why="a launcher sets all of these for a rank",
            fix="torchrun … -m fullshard, which sets them; or env -u RANK fullshard, to start ranks here",
        )


def torchrun_variables_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's environment variables (RANK, WORLD_SIZE, …) for a task of a SLURM job step.

    All tasks compute the same port, from the numbers of the job and the step, without communication.
    https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    tasks = environment["SLURM_STEP_NUM_TASKS"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", tasks)
    node = int(environment.get("SLURM_NODEID", "0"))
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(count_slurm_tasks_on_node(per_node, node)),
        "MASTER_ADDR": first_slurm_host(nodes),
        # Below the ports that kernels assign automatically (32768 and up).
        "MASTER_PORT": str(10_000 + (job * 31 + step) % 20_000),
    }


def first_slurm_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: `gpu[003-006,9],login1` -> `gpu003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def count_slurm_tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Returns the number of tasks on node `node`. `2(x3),1` means 2 on each of the nodes 0 to 2, then 1."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]


def set_default_log_levels(environment: MutableMapping[str, str]) -> None:
    """Sets torch's log level to errors and NCCL's to warnings, unless the user has set other levels."""
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("NCCL_DEBUG", "WARN")


def set_default_user_name(environment: MutableMapping[str, str]) -> None:
    """Names a user without an entry in /etc/passwd by its number: torch's caches and trackers need a name."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["LOGNAME"] = str(os.getuid())


def set_default_allocator(environment: MutableMapping[str, str]) -> None:
    """Makes the allocator of CUDA grow its segments, unless the user has configured it.

    A segment that can grow is not left behind as a block that is too small for the next request, and its free
    pages go back to the device before an allocation fails.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS


def set_default_omp_threads(environment: MutableMapping[str, str]) -> None:
    """Sets OMP_NUM_THREADS to the cores per rank of this machine, unless the user has set it."""
    cores = count_cores_of_rank(int(environment.get("LOCAL_WORLD_SIZE", "1")), environment=environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(int(cores), 1)))
