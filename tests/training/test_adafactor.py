"""Adafactor on shards is transformers' Adafactor on whole parameters, to the rounding of sums."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.checkpoint import load, save
from fullshard.errors import PlanError, SpecError
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.adafactor import Adafactor
from fullshard.training.groups import make_parameter_groups
from fullshard.training.state import TrainState
from tests.training import given_gradients
from tests.training.given_gradients import (
    CASES,
    DECODER,
    MIXTURE,
    ODD,
    RATE,
    STEPS,
    Tensors,
    assert_training_does_not_depend_on_ranks_nor_on_microbatches,
    bits_by_decision,
    bits_of_skipped_step,
    gradients,
    resumed_on_fewer_ranks,
    set_gradients,
    state_after_resume,
    state_after_updates,
    state_of,
)
from tests.training.runs import same_bits, whole
from tests.training.same_numbers import build

TOLERANCE = 1e-5  # of what a parameter moved, and of a second moment: sums of ranks have other orders
NORMS = "optimizer.groups=[{match=['*norm*'], weight_decay=0.3, lr_factor=0.5}]"
NAMES = {"exp_avg_sq_row": "row_var", "exp_avg_sq_col": "col_var", "exp_avg_sq": "variance"}


def run_of(ranks: int, model: str, strategy: str = "full_shard", **more: Any) -> Run:
    return given_gradients.run_of("adafactor", ranks, model, strategy=strategy, **more)


def moments_of(state: TrainState) -> Tensors:
    """The second moments, whole, without dims of size 1."""
    found = Tensors()
    for name, parameter in state.model.named_parameters():
        for key, one in state.optimizer.state.get(parameter, {}).items():
            full = one.full_tensor() if isinstance(one, DTensor) else one
            found[f"{name}.{key}"] = full.squeeze()
    return found


def updated_here(run: Run, model: str) -> tuple[Tensors, Tensors]:
    """(parameters, second moments) after STEPS updates with given gradients."""
    state = state_after_updates(run, model)
    return whole(state.model), moments_of(state)


def updated_by_transformers(run: Run, model: str) -> tuple[Tensors, Tensors]:
    """(parameters, second moments), without sharding."""
    optimization = pytest.importorskip("transformers.optimization")
    module = materialize(build(model, run), seed=run.run.seed)
    groups = make_parameter_groups(module, run.optimizer)
    own = optimization.Adafactor(groups, lr=RATE, relative_step=False, scale_parameter=False)
    for step in range(STEPS):
        given = gradients(module, step)
        for name, parameter in module.named_parameters():
            parameter.grad = given.get(name)
        own.step()
    names = {one: name for name, one in module.named_parameters()}
    moments = {
        f"{names[one]}.{NAMES[key]}": value.squeeze()
        for one, state in own.state.items()
        for key, value in state.items()
        if key in NAMES
    }
    return whole(module), moments


def differing(run: Run, model: str, found: tuple[Tensors, Tensors]) -> list[str]:
    first = dict(materialize(build(model, run), seed=run.run.seed).named_parameters())
    (values, moments), (wanted, wanted_moments) = found, updated_by_transformers(run, model)
    scales = {name: (one - first[name].detach()).abs().max() for name, one in wanted.items() if name in first}
    off = [
        name
        for name, scale in scales.items()
        if first[name].requires_grad and (values[name] - wanted[name]).abs().max() > TOLERANCE * scale
    ]
    known = {name: one for name, one in wanted_moments.items() if name in moments}
    off += [
        name for name, one in known.items() if (moments[name] - one).abs().max() > TOLERANCE * one.abs().max()
    ]
    # A matrix of one row or column has all elements here, and another name in transformers.
    others = {name for name in moments if name.endswith((".variance", ".step"))}
    return off + sorted(moments.keys() - known.keys() - others)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_of_given_gradients_is_that_of_whole_parameters(case: tuple[Any, ...], ranks: Any) -> None:
    count, model, strategy, more = case
    run = run_of(count, model, strategy, **more)
    for found in ranks(count).run(updated_here, run, model):
        assert differing(run, model, found) == []


class Scores(nn.Module):
    """Parameters of one row or element, of which all but one rank have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.token = nn.Parameter(torch.ones(1, 1, 6))


def scores_after_two_steps() -> Tensors:
    torch.manual_seed(0)
    model = Scores()
    fully_shard(model)
    optimizer = Adafactor(model.parameters(), lr=RATE)
    for step in range(2):
        for number, parameter in enumerate(cast(Iterable[DTensor], model.parameters())):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step + number))
            parameter.grad = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        optimizer.step()
    return whole(model)


def test_parameters_of_one_row_are_on_one_rank(ranks: Any) -> None:
    (expected,) = ranks(1).run(scores_after_two_steps)
    for found in ranks(3).run(scores_after_two_steps):
        assert found.keys() == expected.keys()
        for name, one in found.items():
            torch.testing.assert_close(one, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_groups_have_their_own_rate_and_decay(ranks: Any) -> None:
    run = run_of(2, DECODER, extra=[NORMS])
    assert differing(run, DECODER, ranks(2).run(updated_here, run, DECODER)[0]) == []


class CountAllReduces(TorchDispatchMode):
    """Counts the all-reduces of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.startswith("c10d::allreduce")
        return func(*args, **(kwargs or {}))


def all_reduces_of_update(run: Run, model: str) -> int:
    state, _ = state_of(run, model)
    set_gradients(state.model, 0)
    with CountAllReduces() as found:
        state.optimizer.step()
    return found.count


@pytest.mark.parametrize(
    ("count", "model", "more", "wanted"),
    [
        (1, DECODER, {}, 0),
        (2, DECODER, {}, 2),
        (4, DECODER, {"tensor": 2}, 5),  # also of means of columns that are divided
    ],
)
def test_all_parameters_share_their_all_reduces(
    count: int, model: str, more: dict[str, Any], wanted: int, ranks: Any
) -> None:
    run = run_of(count, model, **more)
    assert ranks(count).run(all_reduces_of_update, run, model) == [wanted] * count


# Resumed, skipped, accumulated #
def resumed(*given: Any) -> tuple[Tensors, Tensors]:
    state = state_after_resume(*given)
    return whole(state.model), moments_of(state)


@pytest.mark.parametrize("model", [ODD, MIXTURE])
def test_a_resume_on_fewer_ranks_is_the_run_without_a_break(model: str, ranks: Any, tmp_path: Path) -> None:
    found = resumed_on_fewer_ranks(ranks, tmp_path, model=model, resume=resumed, name="adafactor")
    assert differing(run_of(1, model), model, found) == []


def kept_bits(run: Run, source: Path | None, target: Path) -> tuple[Tensors, Tensors]:
    state, plan = state_of(run, ODD)
    if source is None:
        set_gradients(state.model, 0)
        state.optimizer.step()
        save(state, target, plan=plan)
    else:
        load(state, source)
    return whole(state.model), moments_of(state)


def test_a_checkpoint_has_the_bits_of_the_second_moments(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(3).run(kept_bits, run_of(3, ODD), None, tmp_path)[0]
    for found, before in zip(
        ranks(2).run(kept_bits, run_of(2, ODD), tmp_path, tmp_path)[1], saved, strict=True
    ):
        assert same_bits(found, before)


@pytest.mark.parametrize("found_inf_before", [0.0, 1.0])
def test_a_step_that_the_device_skips_leaves_every_bit(found_inf_before: float, ranks: Any) -> None:
    assert ranks(2).run(bits_of_skipped_step, run_of(2, ODD), ODD, found_inf_before) == [[], []]


def test_host_and_device_decide_alike(ranks: Any) -> None:
    run = run_of(2, ODD)
    device, host = (ranks(2).run(bits_by_decision, run, ODD, how, True)[1] for how in ("device", "host"))
    assert same_bits(device, host)


def test_training_does_not_depend_on_ranks_nor_on_microbatches(ranks: Any) -> None:
    assert_training_does_not_depend_on_ranks_nor_on_microbatches("adafactor", ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["offload.tier=optimizer:cpu"], "only AdamW's state is kept outside"),
        (["precision.mode=bf16_pure"], "rounds its updates stochastically, which adafactor does not"),
        (['optimizer.groups=[{match = ["*"], kind = "adamw"}]'], 'needs name = "muon"'),
    ],
)
def test_settings_that_do_not_work_with_adafactor_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises((SpecError, PlanError), match=message):
        Plan.from_run(Run.load(overrides=["optimizer.name=adafactor", *settings]), world_size=2)


def build_with(option: str) -> None:
    state_of(run_of(1, DECODER, extra=[f"optimizer.options={option}"]), DECODER)


@pytest.mark.parametrize("option", ["{beta1=0.9}", "{relative_step=true}"])
def test_options_that_adafactor_has_not_are_refused(option: str, ranks: Any) -> None:
    with pytest.raises(SpecError, match="adafactor cannot train these parameters with these options"):
        ranks(1).run(build_with, option)
