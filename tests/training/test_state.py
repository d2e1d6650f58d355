"""TrainState: the contents of its checkpoint, from which another state continues bitwise."""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint import save
from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.training.extra_state import (
    empty_generator_states_to_fill,
    generator_states,
    seed_generators,
    set_generator_states,
)
from fullshard.training.loop import train
from fullshard.training.state import LossScale, TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY, OddModel
from tests.training.runs import (
    local_bits,
    mean_square,
    pairs,
    run_of,
    same_bits,
    sharded,
)


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in memory, of this rank's parts."""

    values: dict[str, Any]
    saved: dict[str, SavedTensor]
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, state: TrainState) -> "Snapshot":
        tensors = state.tensors()
        saved = {name: SavedTensor.from_tensor(tensor) for name, tensor in tensors.items()}
        return cls(
            state.values(), saved, {name: local_tensor(tensor).clone() for name, tensor in tensors.items()}
        )

    def load(self, state: TrainState) -> None:
        receivers = state.load_targets(self.saved)
        for name, receiver in receivers.items():
            assert SavedTensor.from_tensor(receiver) == self.saved[name], name
            local_tensor(receiver).copy_(self.parts[name])
        state.load_values(self.values, receivers)


def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that draws from the process's random numbers, as dropout and layer drop do."""
    return mean_square(model, batch) * (1 + torch.rand(()) + random.gauss() + np.random.standard_normal())


def advance(state: TrainState, plan: Plan, *, steps: int) -> None:
    for _, _step in zip(range(steps), train(state, plan, loss=noisy), strict=False):
        pass


def resumed(*overrides: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Values of both, and whether the bits are the same, of a run of six steps and one that was resumed after
    three by a state with another past."""
    torch.manual_seed(5 + dist.get_rank())
    state, plan = sharded(run_of("train.steps=6", *overrides))
    advance(state, plan, steps=3)
    snapshot = Snapshot.of(state)
    advance(state, plan, steps=3)
    other, _ = sharded(run_of("train.steps=6", *overrides))
    torch.manual_seed(99)
    advance(other, plan, steps=1)
    snapshot.load(other)
    assert other.step == 3
    advance(other, plan, steps=3)
    return state.values(), other.values(), same_bits(local_bits(state), local_bits(other))


@pytest.mark.parametrize(
    ("n", "overrides"),
    [
        (3, ()),
        (4, ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")),
        (2, ("optimizer.options={fused=false, amsgrad=true}",)),
        (2, ("optimizer.name=sgd", "optimizer.options={momentum=0.9}")),
        (2, ("optimizer.name=torch.optim.ASGD",)),
        (2, ("precision.mode=bf16_pure",)),
        (2, ("precision.mode=fp16",)),
    ],
)
def test_resumed_state_continues_bitwise(n: int, overrides: tuple[str, ...], ranks: Any) -> None:
    for straight, resumed_values, same in ranks(n).run(resumed, *overrides):
        assert resumed_values == straight
        assert straight["step"] == 6
        assert same


def back_to_the_start() -> bool:
    state, plan = sharded(run_of("optimizer.name=sgd", "optimizer.options={momentum=0.9}"))
    snapshot = Snapshot.of(state)
    ends = []
    for _ in range(2):
        snapshot.load(state)
        advance(state, plan, steps=3)
        ends.append(local_bits(state))
    return same_bits(*ends)


def test_a_state_that_goes_back_to_its_first_step_forgets_its_momentum(ranks: Any) -> None:
    assert ranks(1).run(back_to_the_start) == [True]


def scale_after_loading() -> tuple[LossScale, LossScale]:
    run = run_of("precision.mode=fp16")
    state, plan = sharded(run)
    state.loss_scale = LossScale(32.0, window=50, good_steps=7)
    other, _ = sharded(run)
    Snapshot.of(state).load(other)
    loaded = LossScale(**vars(other.loss_scale))
    next(iter(train(other, plan, loss=mean_square)))
    return loaded, other.loss_scale


def test_loss_scale_resumes_in_its_window(ranks: Any) -> None:
    assert ranks(1).run(scale_after_loading) == [
        (LossScale(32.0, window=50, good_steps=7), LossScale(32.0, window=50, good_steps=8))
    ]


# What it holds #
class TiedOdd(OddModel):
    def __init__(self) -> None:
        super().__init__(tied=True)


def names_and_values() -> tuple[set[str], dict[str, Any], dict[str, Any]]:
    run = run_of("data.sequence_length=9", "train.steps=1")
    state, plan = sharded(run, model=TiedOdd, data=Rows(VOCABULARY))
    fresh = {name for name in state.tensors() if name.startswith("optimizer.")}
    assert not fresh
    list(train(state, plan))
    parameters = dict(state.model.named_parameters())
    shapes = {
        name: tuple(parameter.shape) for name, parameter in parameters.items() if parameter.requires_grad
    }
    return set(state.tensors()), state.values(), shapes


def test_it_holds_model_optimizer_and_random_state_under_their_names(ranks: Any) -> None:
    for rank, (names, values, trainable) in enumerate(ranks(2).run(names_and_values)):
        model = {name.removeprefix("model.") for name in names if name.startswith("model.")}
        assert model == set(TiedOdd().state_dict()) - {"head.weight"}, "buffers too; tied weights once"
        optimizer = {name for name in names if name.startswith("optimizer.")}
        assert optimizer == {
            f"optimizer.{n}.{k}" for n in trainable for k in ("step", "exp_avg", "exp_avg_sq")
        }
        assert names - optimizer - {f"model.{name}" for name in model} == {
            f"rng.{kind}.{rank}" for kind in ("cpu", "python", "numpy")
        }
        assert values["tied"] == {"head.weight": "embedding.weight"}
        assert values["optimizer"] == "AdamW"
        assert (values["step"], values["skipped"]) == (1, 0)


def after_a_forward(strategy: str) -> tuple[bool, bool]:
    """(the same tensors as before, the same receivers), with units that a validation left gathered."""
    state, plan = sharded(run_of(f"sharding.strategy={strategy}"))
    advance(state, plan, steps=2)
    snapshot = Snapshot.of(state)
    with torch.no_grad():
        state.model(pairs(0)[0])
    after = Snapshot.of(state)
    with torch.no_grad():
        state.model(pairs(0)[0])
    for part in snapshot.parts.values():
        if part.is_floating_point():
            part.zero_()
    snapshot.load(state)
    with torch.no_grad():
        loaded = bool((state.model(pairs(0)[0]) == 0).all())
    return (after.saved == snapshot.saved) and "optimizer.head.weight.exp_avg" in after.saved, loaded


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_units_that_are_gathered_are_saved_and_loaded_as_shards(strategy: str, ranks: Any) -> None:
    assert ranks(2).run(after_a_forward, strategy) == [(True, True)] * 2


# What is refused #
def refusals() -> dict[str, str]:
    state, plan = sharded(run_of())
    advance(state, plan, steps=1)
    snapshot = Snapshot.of(state)
    sgd, _ = sharded(run_of("optimizer.name=sgd"))
    said: dict[str, str] = {}
    with pytest.raises(CheckpointError) as raised:
        snapshot.load(sgd)
    said["optimizer"] = str(raised.value)
    changes = {
        "missing": {k: v for k, v in snapshot.saved.items() if k != "model.head.weight"},
        "extra": snapshot.saved | {"model.more": SavedTensor(shape=(2,), dtype="float32")},
        "shape": snapshot.saved | {"model.head.bias": SavedTensor(shape=(3,), dtype="float32")},
        "stranger": snapshot.saved | {"optimizer.more.exp_avg": SavedTensor(shape=(2,), dtype="float32")},
    }
    for name, saved in changes.items():
        with pytest.raises(CheckpointError) as raised:
            state.load_targets(saved)
        said[name] = str(raised.value)
    return said


def test_another_optimizer_or_model_is_refused(ranks: Any) -> None:
    (said,) = ranks(1).run(refusals)
    assert "AdamW in the checkpoint, SGD here" in said["optimizer"]
    assert "not in the checkpoint: model.head.weight" in said["missing"]
    assert "only in the checkpoint: model.more" in said["extra"]
    assert "model.head.bias is float32 [3] there and float32 [2] here" in said["shape"]
    assert "optimizer state for more, which the model does not have" in said["stranger"]


UNUSABLE = {
    "model.head.weight": (torch.inf, torch.nan),
    "optimizer.head.weight.exp_avg": (torch.nan, -torch.inf),
    "optimizer.layers.0.linear.bias.exp_avg_sq": (-1.0, torch.inf),
}


def refused_saves(directory: Path) -> list[str]:
    state, plan = sharded(run_of())
    state.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    advance(state, plan, steps=1)
    refused = []
    for name, values in UNUSABLE.items():
        (first, *_) = local_tensor(state.tensors()[name]).view(-1)
        before = first.item()
        for value in values:
            first.fill_(value)
            with pytest.raises(CheckpointError, match=re.escape(f"{name} is not saved")):
                save(state, directory)
            refused.append(name)
        first.fill_(before)
    save(state, directory)
    return refused


def test_a_state_that_cannot_be_trained_on_is_not_saved(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1).run(refused_saves, tmp_path) == [[name for name in UNUSABLE for _ in range(2)]]
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["step-00000001"]


def draw() -> tuple[float, float, float]:
    return torch.rand([]).item(), random.random(), float(np.random.rand())


def draw_seeded() -> tuple[float, float, float]:
    seed_generators(Plan.from_run(run_of(), world_size=2))
    return draw()


def draw_after_resume_on_more_ranks() -> tuple[float, float, float]:
    """The checkpoint has the states of rank 0 alone."""
    seed_generators(Plan.from_run(run_of(), world_size=2))
    saved = {f"{name[:-1]}0": state for name, state in generator_states().items()}
    draw()
    read = {name: saved[name] for name in empty_generator_states_to_fill(saved)}
    set_generator_states(read)
    return draw()


def test_host_random_numbers_are_equal_on_all_ranks(ranks: Any) -> None:
    drawn = ranks(2).run(draw_seeded)
    assert drawn[0] == drawn[1]
    assert ranks(2).run(draw_after_resume_on_more_ranks) == drawn
