"""Models that take batches of their own train by the same `train`, the same at any number of ranks."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.data.build import build_data
from fullshard.models.build import build_model
from fullshard.models.loss import choose_loss
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.architectures_hf import ENCODER_DECODERS, IMAGES, MASKED, write_config

NAMES = ["pyramid", "t5", *(n for n in (*ENCODER_DECODERS, *MASKED, *IMAGES) if n != "t5")]


def losses(name: str) -> list[tuple[float, int]]:
    """(loss, what it is the mean over) of three steps of four rows, two microbatches each."""
    ranks = dist.get_world_size()
    own = ["model.python=tests.models.own:Pyramid", "train.loss=tests.models.own:square_loss"]
    with tempfile.TemporaryDirectory() as directory:
        write_config("t5" if name == "pyramid" else name, Path(directory))
        run = Run.load(
            overrides=[
                *(own if name == "pyramid" else [f"model.hf={directory}"]),
                "data.source=python",
                "data.factory=tests.models.own:Given",
                f"data.options.name={name}",
                "train.global_batch=4",
                f"train.microbatch={2 // ranks}",
                "train.steps=3",
                "precision.mode=fp32",
            ]
        )
        model = build_model(run)
    plan = Plan.from_run(run, world_size=ranks)
    loss = choose_loss(run, model)
    shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=build_data(run))
    return [(step.loss, step.trained_tokens) for step in train(state, plan, loss=loss)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in NAMES[:2] else pytest.mark.long) for n in NAMES]
)
def test_steps_are_the_same_on_two_ranks_as_on_one(name: str, ranks: Any) -> None:
    (alone,) = ranks(1).run(losses, name)
    for one in ranks(2).run(losses, name):
        assert [count for _, count in one] == [count for _, count in alone]
        assert [loss for loss, _ in one] == pytest.approx([loss for loss, _ in alone], rel=1e-5)
