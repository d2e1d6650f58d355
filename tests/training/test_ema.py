"""[ema]: the sharded average equals one of whole parameters, is saved, and is exchanged exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard.checkpoint import load, save
from fullshard.errors import CheckpointError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.ema import ParameterAverage
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.training.runs import (
    Pairs,
    Regression,
    advance,
    local_bits,
    logged,
    mean_square,
    meta,
    run_of,
    same_bits,
    whole,
)

DECAY = 0.75
EMA = f"ema.decay={DECAY}"


def state_of(*more: str, ema: bool = True, model: type[nn.Module] = Regression) -> tuple[TrainState, Plan]:
    plan = Plan.from_run(run_of(*more), world_size=torch.distributed.get_world_size(), device="cpu")
    module = shard(meta(model), plan)
    return TrainState(module, build_optimizer(module, plan), data=Pairs(), ema=ema), plan


def averages(state: TrainState) -> dict[str, Tensor]:
    """The averages, gathered, by the parameters' names. Collective."""
    found = {name.removeprefix("ema."): t for name, t in state.tensors().items() if name.startswith("ema.")}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def masters(state: TrainState) -> dict[str, Tensor]:
    names = {f"model.{name}" for name, one in state.model.named_parameters() if one.requires_grad}
    found = {name: t for name, t in state.tensors().items() if name in names}
    return {
        name.removeprefix("model."): (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in found.items()
    }


def trained_beside_reference(more: list[str]) -> list[bool]:
    """Trains six steps. Returns, per step, whether the averages equal those of the whole parameters."""
    state, plan = state_of(EMA, *more)
    section = plan.run.ema
    expected = {name: one.float() for name, one in masters(state).items()}
    equal: list[bool] = []
    for step in train(state, plan, loss=mean_square):
        own = masters(state)
        if step.index <= section.start or step.index % section.every == 0:
            weight = 1.0 if step.index <= section.start else 1 - section.decay
            for name, average in expected.items():
                average.lerp_(own[name].float(), weight)
        equal.append(same_bits(averages(state), expected))
    return equal


CASES = [
    (1, []),
    (2, []),
    (3, ["ema.every=2", "ema.start=3"]),
    (2, ["precision.mode=bf16_pure"]),
    (2, ["offload.tier=optimizer:cpu"]),
    (2, ["offload.tier=params+optimizer:cpu", "precision.mode=bf16", "offload.sub_group_parameters=16"]),
    (2, ["sharding.strategy=no_shard", "optimizer.name=sgd"]),
    (4, ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"]),
]


@pytest.mark.parametrize(("world", "more"), CASES)
def test_sharded_averages_equal_those_of_whole_parameters(world: int, more: list[str], ranks: Any) -> None:
    for equal in ranks(world).run(trained_beside_reference, more):
        assert equal == [True] * 6


def test_an_average_begins_as_the_parameters_and_start_may_be_a_fraction() -> None:
    run = run_of(EMA, "ema.start=0.5")
    assert run.ema.start == 3


# Skips #
def skipping(model: nn.Module, batch: Any) -> Tensor:
    value = mean_square(model, batch)
    return value * float("nan") if getattr(model, "spoiled", False) else value


def around_a_skipped_step() -> tuple[bool, bool]:
    state, plan = state_of(EMA)
    steps = train(state, plan, loss=skipping)
    next(steps)
    before = averages(state)
    state.model.spoiled = True  # type: ignore[assignment]
    assert next(steps).skipped
    after = averages(state)
    return same_bits(before, after), state.step == 2


def test_a_skipped_step_leaves_averages(ranks: Any) -> None:
    assert ranks(2).run(around_a_skipped_step) == [(True, True)] * 2


def test_a_decision_on_the_device_gives_the_bits_of_one_on_the_host() -> None:
    def of_model(skipped: Tensor | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Regression()
        average = ParameterAverage(model)
        average.begin()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape))
        average.update(run_of(EMA).ema, step=1, skipped=skipped)
        return average.tensors()

    assert same_bits(of_model(None), of_model(torch.zeros(())))
    torch.manual_seed(0)
    kept = {f"ema.{name}": one.detach() for name, one in Regression().named_parameters()}
    assert same_bits(of_model(torch.ones(())), kept)


# Checkpoints #
def train_and_save(directory: Path, until: int, more: list[str]) -> tuple[list[str], Any]:
    state, plan = state_of(EMA, *more)
    with logged() as messages:
        load(state, directory, missing_ok=True)
        loaded = averages(state)
        advance(state, plan, to=until)
    save(state, directory, plan=plan)
    return messages, (loaded, averages(state))


def test_averages_are_resharded_bitwise_when_loaded(ranks: Any, tmp_path: Path) -> None:
    (_, (_, saved)), *_ = ranks(3).run(train_and_save, tmp_path, 2, [])
    for world, more in ((2, ["offload.tier=optimizer:cpu"]), (1, [])):
        (messages, (loaded, saved_next)), *_ = ranks(world).run(train_and_save, tmp_path, 2 + world, more)
        assert same_bits(loaded, saved)
        assert not any("average" in one for one in messages)
        saved = saved_next


def continue_with(directory: Path, decay: float) -> tuple[list[str], bool, bool]:
    state, plan = state_of(f"ema.decay={decay}", ema=decay > 0)
    with logged() as messages:
        load(state, directory)
        before = masters(state)
        first = averages(state)
        next(train(state, plan, loss=mean_square))
    return messages, same_bits(first, before), any(name.startswith("ema.") for name in state.tensors())


def save_without(directory: Path, decay: float) -> None:
    state, plan = state_of(f"ema.decay={decay}", ema=decay > 0)
    advance(state, plan, to=1)
    save(state, directory, plan=plan)


def test_a_resume_that_adds_an_average_begins_it_and_prints_so(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_without, tmp_path, 0.0)
    (messages, equal, kept), *_ = ranks(2).run(continue_with, tmp_path, 0.5)
    assert equal
    assert kept
    assert any("has no average of 8 of 8 trained parameters" in one for one in messages)
    assert any("ema.decay 0.0 -> 0.5" in one for one in messages)


def test_a_resume_that_drops_the_average_prints_so(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_without, tmp_path, 0.5)
    (messages, _, kept), *_ = ranks(2).run(continue_with, tmp_path, 0.0)
    assert not kept
    assert any("averages of parameters are not kept" in one for one in messages)


# Swap #
def swapped_and_back(more: list[str]) -> tuple[bool, bool, bool, list[str]]:
    state, plan = state_of(EMA, *more)
    advance(state, plan, to=3)
    before, expected = local_bits(state), averages(state)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    errors: list[str] = []
    with fs.averaged_weights(state), torch.no_grad():
        within = state.model(x)
        for act in (state.tensors, lambda: advance(state, plan, to=4)):
            try:
                act()
            except TrainError as error:
                errors.append(error.what)
    reference = Regression()
    reference.load_state_dict({name: one.float() for name, one in expected.items()})
    same = torch.allclose(
        within.float(), reference(x), rtol=1e-2 if more else 1e-6, atol=1e-2 if more else 1e-7
    )
    with torch.no_grad():
        outside = state.model(x)
    return same, not torch.equal(within, outside), same_bits(before, local_bits(state)), errors


@pytest.mark.parametrize(
    "more", [[], ["precision.mode=bf16_pure"], ["offload.tier=params+optimizer:cpu", "precision.mode=bf16"]]
)
def test_the_model_computes_with_averages_and_both_come_back_bitwise(more: list[str], ranks: Any) -> None:
    for same, differs, restored, errors in ranks(3).run(swapped_and_back, more):
        assert (same, differs, restored) == (True, True, True)
        assert errors == ["the parameters are exchanged for their averages."] * 2


def mismatches() -> list[str]:
    found: list[str] = []
    for decay, ema in ((0.0, True), (0.5, False)):
        state, plan = state_of(f"ema.decay={decay}", ema=ema)
        with pytest.raises(TrainError) as raised:
            next(train(state, plan, loss=mean_square))
        found.append(raised.value.got or "")
    state, _ = state_of(ema=False)
    with pytest.raises(TrainError, match="keeps no averages"), fs.averaged_weights(state):
        pass
    return found


def test_a_state_and_a_run_that_differ_are_refused(ranks: Any) -> None:
    assert ranks(1).run(mismatches)[0] == [
        "TrainState(ema=True), ema.decay = 0",
        "TrainState(ema=False), ema.decay = 0.5",
    ]


def test_a_drive_does_not_hold_averages() -> None:
    with pytest.raises(SpecError, match=r"ema\.decay does not go with offload\.tier"):
        Run.load(overrides=[EMA, "offload.tier=optimizer:nvme"])


# Export #
class Tied(Regression):
    """Its last layer has the weight of its first, and its middle one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight = self.layers[0].linear.weight  # type: ignore[union-attr]
        self.layers[1].requires_grad_(False)


def save_tied(directory: Path) -> Any:
    state, plan = state_of(EMA, model=Tied)
    advance(state, plan, to=3)
    save(state, directory / "checkpoints", plan=plan)
    return averages(state), whole(state.model)


def test_an_export_of_averages_has_frozen_parameters_and_aliases_too(ranks: Any, tmp_path: Path) -> None:
    (average, parameters), *_ = ranks(2).run(save_tied, tmp_path)
    fs.export(tmp_path / "checkpoints", tmp_path / "ema.safetensors", weights="ema")
    written = load_file(tmp_path / "ema.safetensors")
    assert same_bits(written, parameters | average)
    assert average.keys() == {name for name in parameters if "layers.1" not in name}
    assert not torch.equal(average["head.weight"], parameters["head.weight"])


def test_a_checkpoint_without_averages_exports_none(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(save_without, tmp_path, 0.0)
    with pytest.raises(CheckpointError, match="holds no averages"):
        fs.export(tmp_path, tmp_path / "ema.safetensors", weights="ema")
