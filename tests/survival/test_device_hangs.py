"""A diagnosis names the ranks that hang, from reports as ranks with NCCL would make them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.survival.diagnosis import Diagnosis, RankReport, diagnose_hang
from fullshard.survival.flight_recorder import find_unfinished_collectives, read_recorded_collectives
from fullshard.survival.phase import Heartbeat, RunPhase
from fullshard.survival.watchdog import waits_for_other_ranks

TORCH = "/lib/site-packages/torch"
READS_FIGURES = (f"{TORCH}/cuda/streams.py", "/lib/fullshard/training/figures.py", "/home/me/train.py")
IN_MODEL = ("/home/me/model.py", f"{TORCH}/nn/modules/module.py", "/home/me/train.py")
IN_LOADER = ("/home/me/loader.py", "/lib/fullshard/training/loop.py")
RANKS, CULPRIT = range(8), 3
SHARDS, REPLICAS = ("1", "mesh_dp_shard"), ("2", "mesh_dp_replicate")

Entry = dict[str, Any]


def entry(
    operation: str,
    number: int,
    *,
    ended: bool = False,
    state: str = "scheduled",
    group: tuple[str, str] = ("0", "default_pg"),
    size: int = 64,
) -> Entry:
    """An entry of torch's flight recorder; the order of an iterable of them is that of their launches."""
    return {
        "profiling_name": operation if ":" in operation else f"nccl:{operation}",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": list(group),
        "input_sizes": [[size]],
        "input_dtypes": ["BFloat16"],
        "state": "completed" if ended else state,
        "retired": ended,
    }


ENDED = [entry("_all_gather_base", 11, ended=True), entry("_reduce_scatter_base", 12, ended=True)]
AHEAD = [entry("_all_gather_base", number) for number in range(13, 40)]


def report(phase: RunPhase, stack: Sequence[str], entries: Sequence[Entry], *, step: int = 4) -> RankReport:
    recorded = find_unfinished_collectives(
        one | {"time_created_ns": place} for place, one in enumerate(entries)
    )
    return RankReport(
        seen=Heartbeat("host", 1, step, str(phase), 31.0, 30.0, 999.0),
        waits=waits_for_other_ranks([stack], recorded),
        place=f"{stack[0]}:1 in f",
        collective=recorded.last,
        unfinished=recorded.unfinished,
        started=recorded.started,
    )


def diagnose(others: Mapping[int, RankReport], culprit: RankReport) -> Diagnosis:
    return diagnose_hang({**others, CULPRIT: culprit}, {}, now=1000.0)


STRICT = {rank: report(RunPhase.OPTIMIZER, READS_FIGURES, [*ENDED, *AHEAD]) for rank in RANKS}
# The hosts are in different places, ahead by different lengths, wherever a launch finds the queue full.
AHEAD_OF_DEVICE = {
    rank: report(
        [RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.DATA][rank % 3],
        [IN_MODEL, (f"{TORCH}/nn/functional.py", *IN_MODEL), IN_LOADER][rank % 3],
        [*ENDED, *AHEAD[: 10 + rank]],
        step=4 + rank % 2,
    )
    for rank in RANKS
}
# Where else hosts wait for their devices, by `.item()` or `.tolist()`, which are no frames of Python.
ELSEWHERE = [
    {rank: report(phase, stack, [*ENDED, *AHEAD[:2]]) for rank in RANKS}
    for phase, stack in [
        (RunPhase.STARTING, ("/lib/fullshard/parallel/materialize.py",)),
        (RunPhase.LOADING, ("/lib/fullshard/weights/pretrained.py",)),
        (RunPhase.BETWEEN_STEPS, READS_FIGURES),
        (RunPhase.VALIDATING, ("/lib/fullshard/training/between_steps.py",)),
        (RunPhase.SAVING, ("/lib/fullshard/checkpoint/background.py",)),
        (RunPhase.FINISHING, ("/home/me/sample.py",)),
    ]
]
EVERYWHERE = [STRICT, AHEAD_OF_DEVICE, *ELSEWHERE]


@pytest.mark.parametrize("others", EVERYWHERE)
@pytest.mark.parametrize(
    "stack",
    [
        IN_LOADER,
        IN_MODEL,
        READS_FIGURES,  # of its own work: nothing that it has launched waits for others
        (f"{TORCH}/distributed/checkpoint/filesystem.py", "/home/me/train.py"),
    ],
)
def test_the_rank_without_an_unfinished_collective_is_named(
    others: dict[int, RankReport], stack: tuple[str, ...]
) -> None:
    verdict = diagnose(others, report(RunPhase.DATA, stack, ENDED))
    assert verdict.error.what.startswith(
        "rank 3 does not come to the collective that ranks 0-2, 4-7 wait in: in data of step 5"
    )
    assert len(str(verdict.error.got).splitlines()) == 2, "ranks whose devices wait alike are one group"
    assert "nccl:_all_gather_base 13 of default_pg [64] BFloat16, not ended" in str(verdict.error.got)


@pytest.mark.parametrize("others", EVERYWHERE)
def test_the_rank_whose_device_is_in_another_collective_is_named(others: dict[int, RankReport]) -> None:
    """It left one out. What the hosts have launched last is alike, and one host is as far as any other."""
    skipped = [*ENDED, entry("_reduce_scatter_base", 13), *AHEAD[1:]]
    verdict = diagnose(others, report(RunPhase.FORWARD, IN_MODEL, skipped))
    assert verdict.error.what.startswith("rank 3 is in another collective than ranks 0-2, 4-7: nccl:_reduce_")


@pytest.mark.parametrize("others", EVERYWHERE)
def test_where_all_devices_wait_alike_none_is_named(others: dict[int, RankReport]) -> None:
    verdict = diagnose(others, others[CULPRIT])
    assert verdict.error.what.startswith("all ranks wait in the same collective, which does not end")


def test_a_device_that_is_busy_before_the_collective_is_named_where_torch_times_collectives() -> None:
    started = report(RunPhase.FORWARD, IN_MODEL, [*ENDED, entry("all_reduce", 13, state="started"), *AHEAD])
    late = report(RunPhase.FORWARD, IN_MODEL, [*ENDED, entry("all_reduce", 13), *AHEAD])
    verdict = diagnose(dict.fromkeys(RANKS, started), late)
    assert verdict.error.what.startswith(
        "rank 3 launched the collective that ranks 0-2, 4-7 wait in, but earlier work on the device"
    )


def shards(number: int, operation: str = "_all_gather_base") -> list[Entry]:
    return [*ENDED, entry(operation, number, group=SHARDS)]


WAITS_FOR_SHARDS = report(RunPhase.OPTIMIZER, READS_FIGURES, shards(5))
# Its shards have met, and its replica, of which one waits for the culprit, has not come.
WAITS_FOR_REPLICA = report(
    RunPhase.OPTIMIZER, READS_FIGURES, [*ENDED, entry("all_reduce", 2, group=REPLICAS)]
)
HYBRID = {rank: WAITS_FOR_SHARDS if rank < 4 else WAITS_FOR_REPLICA for rank in RANKS}


def test_among_several_groups_the_one_that_differs_within_its_own_is_named() -> None:
    verdict = diagnose(HYBRID, report(RunPhase.DATA, IN_LOADER, ENDED))
    assert verdict.error.what.startswith("rank 3 does not come to the collective that ranks 0-2, 4-7 wait in")
    verdict = diagnose(HYBRID, report(RunPhase.FORWARD, IN_MODEL, shards(5, "_reduce_scatter_base")))
    assert verdict.error.what.startswith("rank 3 is in another collective than ranks 0-2: ")


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        (READS_FIGURES, True),
        (("/lib/fullshard/distributed/collectives.py", "/home/me/train.py"), True),
        # `DTensor.full_tensor`, whose innermost frames are those that call an operation
        (
            (
                f"{TORCH}/_ops.py",
                f"{TORCH}/_library/autograd.py",
                f"{TORCH}/distributed/_functional_collectives.py",
            ),
            True,
        ),
        ((f"{TORCH}/_ops.py", "/home/me/model.py", f"{TORCH}/distributed/fsdp/api.py"), False),
        ((f"{TORCH}/distributed/checkpoint/filesystem.py",), False),
        (IN_LOADER, False),
        ((), False),
    ],
)
def test_without_a_record_of_the_device_the_innermost_frame_decides(
    stack: tuple[str, ...], waits: bool
) -> None:
    for entries in ([], [entry("gloo:all_gather", 3)]):
        assert waits_for_other_ranks([IN_LOADER, stack], find_unfinished_collectives(entries)) == waits


def test_a_collective_of_gloo_beside_the_step_does_not_count_as_waiting() -> None:
    """The ranks' figures are gathered beside the next step, in which a rank may hang."""
    pending = find_unfinished_collectives([*ENDED, entry("gloo:all_gather", 3)])
    assert not waits_for_other_ranks([IN_LOADER], pending)
    assert not pending.unfinished


def test_a_dump_of_this_torch_is_read(ranks: Any) -> None:
    """If torch renames the fields of its flight recorder, this fails."""
    assert ranks(2).run(last_collective) == ["gloo:all_reduce 2 of default_pg [3] Float"] * 2


def last_collective() -> str:
    """The newest collective of this rank, once it has ended."""
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    return read_recorded_collectives().last
