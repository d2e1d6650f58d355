"""A run whose state is on drives dies, and resumes bitwise from its newest whole generation."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import OffloadError, TrainError
from fullshard.offload.drive import SYSTEM
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.shard import close_offloaded_state, offload_settings, shard
from fullshard.training.state import TrainState
from tests.checkpoint.test_verify import flip
from tests.ranks import RankFailed
from tests.training.runs import Regression, local_bits, mean_square, meta, run_of, same_bits, sharded

TIER = "optimizer:nvme"
STEPS = 6
Bits = dict[str, Tensor]


def settings(directory: str, tier: str = TIER) -> list[str]:
    return [f"train.steps={STEPS}", "optimizer.clip_norm=0.5", f"offload.tier={tier}", f"run.dir={directory}"]


def state_on(directory: str) -> tuple[TrainState, Plan]:
    return sharded(run_of(*settings(directory)))


def undisturbed() -> list[tuple[float, Bits]]:
    """Returns the loss and this rank's bits after each step, from 0, without a tier."""
    state, plan = sharded(run_of(*settings("none", "none")))
    after_steps = [(0.0, local_bits(state))]
    return after_steps + [(step.loss, local_bits(state)) for step in train(state, plan, loss=mean_square)]


def until(step: int, directory: str) -> None:
    """Ends as it should, after so many steps."""
    state, plan = state_on(directory)
    for taken in train(state, plan, loss=mean_square):
        if taken.index == step:
            break
    state.wait_for_updates()


def killed(step: int, directory: str, settled: bool) -> None:
    """Rank 0 dies after so many steps, of which it may have written the last; the others in the next one."""
    state, plan = state_on(directory)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if state.step == step:
            os._exit(1)
        return mean_square(model, batch)

    for taken in train(state, plan, loss=loss):
        if taken.index == step and torch.distributed.get_rank() == 0:
            if settled:
                state.wait_for_updates()
            os._exit(1)


def resume(directory: str) -> tuple[int | None, Bits, list[tuple[float, Bits]]]:
    """Returns the resumed step, the bits at it, and what followed."""
    state, plan = state_on(directory)
    step = state.step if state.restore_newest_generation(at_least=0) else None
    bits = local_bits(state)
    return step, bits, [(taken.loss, local_bits(state)) for taken in train(state, plan, loss=mean_square)]


def check(n: int, ranks: Any, directory: Path) -> int | None:
    """Resumes, and compares with the undisturbed run. Returns the step that it resumed from."""
    expected = ranks(n).run(undisturbed)
    resumed = ranks(n).run(resume, str(directory))
    (step,) = {rank[0] for rank in resumed}
    for (_, bits, after), curve in zip(resumed, expected, strict=True):
        assert same_bits(bits, curve[step or 0][1])
        assert len(after) == STEPS - (step or 0)
        for (loss, later), (straight, bits) in zip(after, curve[(step or 0) + 1 :], strict=True):
            assert loss == straight
            assert same_bits(later, bits)
    return step


def manifests(directory: Path, rank: int) -> dict[int, Path]:
    """The manifests of a rank's whole generations, by step."""
    paths = directory.glob(f"offload/state/rank-{rank:05d}/state-*.json")
    return {json.loads(path.read_text().splitlines()[0])["step"]: path for path in paths}


# A run that dies #
@pytest.mark.parametrize(
    ("n", "settled"),
    [(1, True), (3, False), *(pytest.param(*x, marks=pytest.mark.long) for x in [(1, False), (3, True)])],
)
def test_dead_run_resumes_from_a_step_of_all_ranks(n: int, settled: bool, ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"died \(exit code 1\)"):
        ranks(n).run(killed, 4, str(tmp_path), settled)
    assert check(n, ranks, tmp_path) in ({4} if settled and n == 1 else {3, 4})


def test_the_newest_step_that_is_whole_on_all_ranks_is_taken(ranks: Any, tmp_path: Path) -> None:
    ranks(3).run(until, 4, str(tmp_path))
    assert all(manifests(tmp_path, rank).keys() == {3, 4} for rank in range(3))
    manifests(tmp_path, 1)[4].unlink()  # as if it had died before
    assert check(3, ranks, tmp_path) == 3


def begun(directory: str) -> None:
    """As far as a state."""
    state_on(directory)


def test_run_that_dies_before_it_resumes_loses_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(until, 4, str(tmp_path))
    ranks(2).run(begun, str(tmp_path))
    assert check(2, ranks, tmp_path) == 4


@pytest.mark.parametrize(
    ("rank", "steps", "file", "expected"),
    [(1, (4,), ".data", 3), (1, (3, 4), ".data", None), (0, (4,), ".payload", 3)],
)
def test_a_damaged_generation_is_dropped_on_all_ranks(
    rank: int, steps: tuple[int, ...], file: str, *, expected: int | None, ranks: Any, tmp_path: Path
) -> None:
    """Then the older one is taken, and where that is damaged too, none: the state is as it began."""
    ranks(2).run(until, 4, str(tmp_path))
    for step in steps:
        flip(manifests(tmp_path, rank)[step].with_suffix(file), 8 * 100)
    assert check(2, ranks, tmp_path) == expected


def test_run_without_resume_begins_anew(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(until, 4, str(tmp_path))
    ranks(2).run(until, 2, str(tmp_path))
    assert [manifests(tmp_path, rank).keys() for rank in range(2)] == [{1, 2}] * 2
    assert check(2, ranks, tmp_path) == 2


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), pytest.param(2, 1, marks=pytest.mark.long)])
def test_files_of_other_ranks_are_replaced(before: int, after: int, ranks: Any, tmp_path: Path) -> None:
    """Nodes have left or come: what was kept are parts for other ranks, and the checkpoint has all."""
    ranks(before).run(until, 1, str(tmp_path))
    ranks(after).run(until, 2, str(tmp_path))
    assert [manifests(tmp_path, rank).keys() for rank in range(after)] == [{1, 2}] * after


def opened_after_a_failure(directory: str) -> None:
    """In one process: first the drive has no room for what is gathered, on rank 0, then it has."""
    plan = Plan.from_run(
        run_of(*settings(directory, "params+optimizer:nvme")), world_size=torch.distributed.get_world_size()
    )

    def full(path: Path, flags: int, mode: int) -> int:
        if "parameters.data" in path.name and torch.distributed.get_rank() == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.open(path, flags, mode)

    with pytest.raises(OffloadError, match="parameters.data"):
        shard(meta(Regression), plan, offload=offload_settings(plan, replace(SYSTEM, open=full)))
    close_offloaded_state(shard(meta(Regression), plan), plan=plan, finished=True)


def test_failed_open_is_released_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(opened_after_a_failure, str(tmp_path))


# A run that is dead already #
def skips_all_from(step: int, directory: str) -> None:
    """Skips every step after the given number, until the run ends."""
    state, plan = sharded(run_of(*settings(directory), "train.max_skipped_steps=2"))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mean_square(model, batch) * (torch.nan if state.step >= step else 1.0)

    with pytest.raises(TrainError, match="2 steps in a row"):
        list(train(state, plan, loss=loss))
    local_bits(state)  # can still be read


def breaks_in(step: int, directory: str) -> None:
    """The last update of a run that then dies makes the mean of squares negative: 1.1 v - 0.1 g^2."""
    state, plan = state_on(directory)
    for taken in train(state, plan, loss=mean_square):
        if taken.index == step - 1:
            for group in state.optimizer.param_groups:
                group["betas"] = (0.9, 1.1)
        if taken.index == step:
            break
    state.wait_for_updates()


@pytest.mark.parametrize("act", [skips_all_from, breaks_in])
def test_unusable_generation_is_not_resumed(act: Callable[..., None], ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(act, 4, str(tmp_path))
    assert check(2, ranks, tmp_path) == 3
