"""Who started this process is read from its environment, and nothing is guessed."""

import pytest

from fullshard.errors import LaunchError
from fullshard.launch.environment import (
    count_slurm_tasks_on_node,
    drop_leftover_torchrun_variables,
    first_slurm_host,
    is_started_by_srun,
    is_started_by_torchrun,
    prepare_environment_if_started_as_rank,
    set_default_allocator,
    set_default_log_levels,
    set_default_omp_threads,
    torchrun_variables_from_slurm,
)
from fullshard.system.process import ALLOCATOR_VARIABLES, count_cores_of_rank

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009,12]",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu[9,12]", "gpu9"),
        ("rack[2-3]-node[04,06],a", "rack2-node04"),
        ("gpu[1-2].cluster.example", "gpu1.cluster.example"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_slurm_host(nodes) == host


@pytest.mark.parametrize(("node", "tasks"), [(0, 2), (2, 2), (3, 1), (4, 4)])
def test_slurm_task_counts_expand_to_each_node(node: int, tasks: int) -> None:
    assert count_slurm_tasks_on_node("2(x3),1,4", node) == tasks


def test_a_task_of_srun_becomes_a_rank_of_torchrun() -> None:
    environment = torchrun_variables_from_slurm(SRUN)
    port = int(environment.pop("MASTER_PORT"))
    assert environment == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu007",
    }
    assert 1024 < port < 32768
    assert is_started_by_torchrun({**environment, "MASTER_PORT": str(port)})


RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_variables_that_another_job_left_are_dropped_and_those_of_a_rank_kept() -> None:
    left = {name: value for name, value in RANK.items() if name != "RANK"}
    environment = {**left, "TORCHELASTIC_RUN_ID": "another", "OMP_NUM_THREADS": "3"}
    drop_leftover_torchrun_variables(environment)
    assert environment == {"OMP_NUM_THREADS": "3"}
    assert not prepare_environment_if_started_as_rank(environment)
    for kept in (dict(RANK), SRUN | {"MASTER_PORT": "1"}):
        environment = dict(kept)
        drop_leftover_torchrun_variables(environment)
        assert environment == kept


@pytest.mark.parametrize(
    "changed", [{"WORLD_SIZE": None}, {"MASTER_ADDR": None}, {"RANK": "first"}, {"WORLD_SIZE": "1"}]
)
def test_a_part_of_the_variables_of_a_rank_is_an_error(changed: dict[str, str | None]) -> None:
    environment = {name: value for name, value in (RANK | changed).items() if value is not None}
    drop_leftover_torchrun_variables(environment)
    with pytest.raises(LaunchError, match="RANK="):
        prepare_environment_if_started_as_rank(environment)


def test_the_shell_of_an_interactive_step_is_no_rank() -> None:
    assert not is_started_by_srun(SRUN | {"SLURM_PTY_PORT": "40001"})


def test_all_tasks_of_a_step_meet_at_one_port_and_other_steps_at_another() -> None:
    ports = [
        torchrun_variables_from_slurm(SRUN | changed)["MASTER_PORT"]
        for changed in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "3"})
    ]
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    "not_srun",
    [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}],
)
def test_one_process_in_a_batch_script_or_an_interactive_shell_is_no_rank(not_srun: dict[str, str]) -> None:
    assert is_started_by_srun(SRUN)
    assert not is_started_by_srun(not_srun)


def test_variables_of_the_user_are_kept() -> None:
    chosen = {"OMP_NUM_THREADS": "5", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    environment = dict(chosen)
    set_default_log_levels(environment)
    set_default_omp_threads(environment)
    assert environment == chosen


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_segments_grow_unless_the_user_configured_the_allocator(name: str) -> None:
    environment: dict[str, str] = {}
    set_default_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    chosen = {name: "max_split_size_mb:512"}
    environment = dict(chosen)
    set_default_allocator(environment)
    assert environment == chosen


@pytest.mark.parametrize(
    ("environment", "own", "launcher", "share"),
    [
        ({"RANK": "3", "SLURM_CPUS_ON_NODE": "128"}, 16, 128, 16),  # srun --cpus-per-task=16
        ({"RANK": "3", "SLURM_CPUS_ON_NODE": "64"}, 64, 128, 8),  # srun --cpu-bind=none, in half of a node
        ({"RANK": "3", "SLURM_CPUS_ON_NODE": "128"}, 128, 128, 16),
        ({"RANK": "3", "SLURM_CPUS_ON_NODE": "128"}, 16, 16, 2),  # taskset -c 0-15 torchrun
        (
            {"SLURM_CPUS_ON_NODE": "128"},
            16,
            128,
            2,
        ),  # taskset -c 0-15 fullshard train, before it starts ranks
    ],
)
def test_cores_that_a_rank_has_for_itself_are_not_divided_again(
    environment: dict[str, str], own: int, launcher: int, share: float
) -> None:
    def list_cores(pid: int) -> set[int]:
        return set(range(launcher if pid else own))

    assert count_cores_of_rank(8, environment=environment, list_cores=list_cores) == share


def test_no_rank_is_left_without_a_thread() -> None:
    environment = {"LOCAL_WORLD_SIZE": "100000"}
    set_default_omp_threads(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
