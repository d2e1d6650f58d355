"""Steps of DeepSpeed, then steps of fullshard, are the steps of one run that was never sharded."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import Snapshot
from fullshard.errors import CheckpointError
from fullshard.parallel.materialize import parameters_on_meta
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.takeover import zero
from fullshard.takeover.names import match_names
from fullshard.takeover.write import ImportTarget, make_snapshot, read_all, write_checkpoint
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.takeover.deepspeed_model import SmallModel, batch, loss_of, parameter_groups
from tests.takeover.test_zero import rewrite
from tests.takeover.unpacked import FIXTURES

MORE_STEPS = 2
RUN = Run.load(
    overrides=[
        'model.python="tests.takeover.deepspeed_model:SmallModel"',
        "data.sequence_length=5",
        "train.steps=20",
        "train.global_batch=4",
        "optimizer.learning_rate=1e-2",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_norm=1.0",
        "schedule.kind=constant",
        "schedule.warmup_steps=10",
        "precision.mode=fp32",
    ]
)


class Batches:
    """The batches of 2 ranks of DeepSpeed, cut into ranks' microbatches."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Tensor]:
        yield torch.cat([batch(step, 0), batch(step, 1)]).tensor_split(plan.world_size)[rank]


def train_unsharded(model: SmallModel, rates: Sequence[Sequence[float]], *, ranks: int) -> torch.optim.AdamW:
    """Trains a step at each of the `rates` of the two groups, on the batches of all `ranks`."""
    optimizer = torch.optim.AdamW(parameter_groups(model))
    for step, own in enumerate(rates):
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate
        loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def read_rates(name: str) -> list[list[float]]:
    """Returns the rates of the steps of a fixture, and those of the step after them."""
    with safe_open(FIXTURES / name / "truth.safetensors", "pt") as file:
        return json.loads(file.metadata()["values"])["rates"]


FP32 = {
    "zero1_tied_frozen": (3, {"tied": True, "frozen": True}),
    "zero2_fp32": (3, {}),
    "zero2_round_robin": (2, {}),
    "zero3_subgroups": (2, {"frozen": True}),
    "zero3_offload": (2, {}),
    "universal3": (2, {"frozen": True, "blocks": 1}),
}


@pytest.mark.parametrize(("name", "ranks", "settings"), [(name, *rest) for name, rest in FP32.items()])
def test_taken_over_steps_equal_those_of_an_unsharded_model(name: str, ranks: int, settings: dict[str, Any]):
    torch.manual_seed(0)
    model = SmallModel(**settings)
    optimizer = train_unsharded(model, read_rates(name)[:-1], ranks=ranks)
    found = zero.open_source(FIXTURES / name)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found.weights[key].read(), parameter.detach(), rtol=1e-5, atol=1e-6)
        for moment, tensor in found.optimizer.moments.get(key, {}).items():
            expected = optimizer.state[parameter][moment]
            torch.testing.assert_close(tensor.read(), expected, rtol=1e-3, atol=1e-6 * expected.abs().max())


def make_snapshot_of(path: Path) -> tuple[Snapshot, ImportTarget]:
    target, found = ImportTarget.of_run(RUN), zero.open_source(path)
    return make_snapshot(found, match_names(found, target.model), target=target), target


def continue_on_rank(directory: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Loads a checkpoint, trains MORE_STEPS, and returns the rates of these steps and the weights."""
    plan = Plan.from_run(RUN, world_size=dist.get_world_size(), device="cpu")
    with parameters_on_meta():
        model = SmallModel()
    model = shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=Batches())
    load(state, directory)
    first, rates = state.step, []
    for step in train(state, plan, loss=loss_of):
        rates.append([group["lr"] for group in state.optimizer.param_groups])
        if step.index == first + MORE_STEPS:
            break
    return rates, {name: one.full_tensor().detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize("name", ["zero2_round_robin", "zero3_offload"])
def test_training_continues_as_if_it_had_begun_in_fullshard(name: str, ranks: Any, tmp_path: Path):
    snapshot, target = make_snapshot_of(FIXTURES / name)
    write_checkpoint(snapshot, str(tmp_path), plan=target.plan)
    for rates, weights in ranks(2).run(continue_on_rank, str(tmp_path)):
        torch.manual_seed(0)
        model = SmallModel()
        train_unsharded(model, read_rates(name)[:-1] + rates, ranks=2)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_second_moments_that_are_a_copy_of_the_first_are_refused(tmp_path: Path):
    def make_equal(content: Any) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["exp_avg_sq"] = state["exp_avg"]

    directory = Path(shutil.copytree(FIXTURES / "zero2_round_robin", tmp_path / "copy")) / "global_step3"
    for path in directory.glob("zero_*"):
        rewrite(path, make_equal)
    with pytest.raises(CheckpointError, match="are equal in the source"):
        read_all(make_snapshot_of(directory)[0])
