"""A dry run in a process of its own: what comes back, and what it says when it fails."""

import pickle
import tempfile

import pytest
import torch
from torch import Tensor, nn

from fullshard.dryrun.process import dry_run
from fullshard.dryrun.step import build_run_model
from fullshard.dryrun.values import Program
from fullshard.errors import MissingExtraError, PlanError, ShardError, SpecError, TrainError
from fullshard.spec.plan import Plan
from tests.dryrun.test_step import dry
from tests.planner.measured import plan_of


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


def two_layers(plan: Plan) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))


def rows(plan: Plan) -> Tensor:
    return torch.zeros(plan.microbatch, 8)


def failing(model: nn.Module, batch: Tensor) -> Tensor:
    return _Failing.apply(model(batch)).mean()


HERE = "tests.dryrun.test_process"


def loud(plan: Plan) -> nn.Module:
    print("building")
    return build_run_model(plan)


def test_the_process_finds_what_is_found_here_whatever_the_model_prints_and_makes_no_files(
    monkeypatch: pytest.MonkeyPatch,
):
    plan = plan_of(2, "precision.mode=bf16")
    here = dry(plan, rank=1)
    monkeypatch.setattr(tempfile, "tempdir", __file__)  # not a directory
    assert dry_run(plan, Program(model=f"{HERE}:loud"), rank=1) == here


@pytest.mark.long
def test_an_error_within_backward_is_told():
    with pytest.raises(ShardError, match="did not finish") as ended:
        dry_run(plan_of(2), Program(model=f"{HERE}:two_layers", loss=f"{HERE}:failing", batch=f"{HERE}:rows"))
    assert "no gradient today" in str(ended.value)


@pytest.mark.parametrize("kind", [PlanError, ShardError, SpecError, TrainError])
def test_the_projects_errors_come_back_as_they_are(kind):
    error = kind("what", got=3, why="why", fix="fix")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.why, back.fix) == (kind, str(error), "why", "fix")


def test_an_error_with_parameters_of_its_own_comes_back_too():
    error = MissingExtraError("hf", package="transformers", needed_for="this model")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (MissingExtraError, str(error))
