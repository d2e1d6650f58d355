"""A run whose numbers are broken keeps its last good checkpoint, and everything goes back to that."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint import latest_checkpoint, location_of
from fullshard.checkpoint.manifest import read_manifest
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import TrainError
from fullshard.jobs.checkpoints import RunCheckpointSaver
from fullshard.jobs.train import run_job
from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from fullshard.training.loop import train
from tests.jobs.test_train import TINY
from tests.training.runs import mean_square, run_of, sharded

BREAKS_IN = 8
_steps = 0  # that this process has begun, and those before it that it resumes after


def break_weight(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        weight = next(p for p in reversed(list(model.parameters())) if local_tensor(p).numel())
        with torch.no_grad():
            local_tensor(weight).view(-1)[0] = torch.inf


def breaking_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One element of one weight becomes infinite in step 8."""
    global _steps
    _steps += 1
    if _steps == BREAKS_IN:
        break_weight(model)
    return next_token_loss(model, batch)


def ever_breaking_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """It becomes infinite again, whatever the run goes back to."""
    if _steps + 1 >= BREAKS_IN:
        break_weight(model)
    return breaking_loss(model, batch)


def trained(directory: str, resume_from: int, settings: tuple[str, ...]) -> str:
    """Returns the error that ends the run, which resumes after the step `resume_from` if that is not 0."""
    global _steps
    _steps = resume_from
    overrides = [*TINY, "train.steps=14", "train.max_skipped_steps=4", f"run.dir={directory}", *settings]
    run = Run.load(overrides=overrides)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    try:
        run_job(plan.run, resume=resume_from > 0, plan=plan, command_started=time.time())
    except TrainError as error:
        return str(error)
    return ""


def steps_in(run: Path) -> list[int]:
    return [step for step, _ in location_of(run / "checkpoints").list_checkpoints()]


def loss_setting(loss: Callable[..., object]) -> str:
    return f"train.loss={__name__}:{loss.__name__}"


def test_a_dead_run_keeps_its_last_good_checkpoint_and_names_it(ranks: Any, tmp_path: Path) -> None:
    settings = (
        "checkpoint.every=3",
        "checkpoint.keep=1",
        "checkpoint.mode=async",
        loss_setting(breaking_loss),
    )
    for resume_from in (0, 6):  # as each --resume or restart does
        for error in ranks(2).run(trained, str(tmp_path / "run"), resume_from, settings):
            assert "4 steps in a row had a loss or gradient norm that is not finite" in error
            assert "--resume starts at " in error
            assert "step 6," in error or "step-00000006," in error
        assert steps_in(tmp_path / "run") == [6]


def test_rollbacks_go_to_the_last_good_checkpoint(ranks: Any, tmp_path: Path) -> None:
    settings = ("checkpoint.every=2", "fault_tolerance.on_spike=rollback", loss_setting(ever_breaking_loss))
    error, _ = ranks(2).run(trained, str(tmp_path / "run"), 0, settings)
    events = read_events(tmp_path / "run" / EVENTS, kind="rollback")
    assert [one.details["to_step"] for one in events] == [6, 6, 6]
    assert steps_in(tmp_path / "run") == [6, 4]
    assert "rolled back 3 times" in error
    assert "step-00000006, from before the skipped steps" in error


DAMAGES = {
    "an infinite weight": ("model.head.weight", math.inf),
    "a huge weight": ("model.layers.1.linear.weight", 1e29),
    "NaN in a momentum": ("optimizer.head.weight.exp_avg", math.nan),
    "a negative mean of squares": ("optimizer.layers.0.linear.bias.exp_avg_sq", -1.0),
}


def saves_a_broken_state(directory: Path, damage: str, settings: tuple[str, ...]) -> tuple[list[str], str]:
    """Returns the messages of a save that is due, and the error of the last one. The last rank breaks."""
    state, plan = sharded(run_of("checkpoint.every=1", "checkpoint.keep=1", *settings))
    said: list[str] = []
    name, value = DAMAGES[damage]
    with RunCheckpointSaver(directory, plan, say=said.append) as checkpoints:
        for step in train(state, plan, loss=mean_square):
            if step.index < 3:
                checkpoints.save(state)
            else:
                break
        checkpoints.wait_for_saves()
        own = local_tensor(state.tensors()[name]).view(-1)
        if dist.get_rank() == 1 or not own.numel():
            own[:1] = value
        said.clear()
        checkpoints.save(state)
        checkpoints.wait_for_saves()
        with pytest.raises(TrainError) as raised:
            checkpoints.save_last(state)
    return said, str(raised.value)


@pytest.mark.parametrize(
    ("damage", "settings"),
    [
        ("an infinite weight", ()),
        ("a huge weight", ("checkpoint.mode=async",)),
        ("a huge weight", ("offload.tier=optimizer:cpu",)),
        ("NaN in a momentum", ("offload.tier=optimizer:cpu", "checkpoint.mode=async")),
        ("a negative mean of squares", ()),
    ],
)
def test_a_broken_state_is_refused_while_training_and_saved_apart_at_the_end(
    ranks: Any, tmp_path: Path, damage: str, settings: tuple[str, ...]
) -> None:
    name, value = DAMAGES[damage]
    for said, error in ranks(2).run(saves_a_broken_state, tmp_path, damage, settings):
        assert [line.split("\n")[0] for line in said][0] == "step 3: NOT SAVED; training continues"
        assert f"{name} is not saved" in said[0]
        assert f"{value:g} in {name}" in error
        assert "--resume, which starts at" in error
        assert "step-00000002" in error
    place = location_of(tmp_path)
    assert [step for step, _ in place.list_checkpoints()] == [3, 2]
    assert read_manifest(tmp_path / "step-00000003").unusable == f"{value:g} in {name}"
    assert latest_checkpoint(place) == tmp_path / "step-00000002"
