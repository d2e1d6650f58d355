"""k steps of another trainer and n of fullshard are k + n steps of fullshard."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fullshard import parameters_on_meta
from fullshard.checkpoint import load
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.takeover.write import write_checkpoint
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.takeover.test_formats import run_of, taken_over
from tests.takeover.tiny import Batches, Tiny, initial, loss_of
from tests.takeover.unpacked import FIXTURES
from tests.training.runs import whole

FORMATS = ["fsdp2_dcp/source", "accelerate_sharded/source", "torch_names/source.pt", "accelerate_full/source"]
LAST = 8


def trained(
    run_path: Path, directory: Path | None, extra: list[str]
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains to the last step: from the checkpoint in `directory`, or from the values of all fixtures."""
    run = Run.load(run_path, overrides=extra)
    plan = Plan.from_run(run, world_size=dist.get_world_size(), device="cpu")
    with parameters_on_meta():
        empty = Tiny()
    model = shard(initial() if directory is None else empty, plan)
    state = TrainState(model, build_optimizer(model, plan), data=Batches())
    if directory is not None:
        assert load(state, directory)
    losses: list[float] = []
    for step in train(state, plan, loss=loss_of):
        losses.append(step.loss)
    return losses, whole(model)


@pytest.mark.parametrize(
    ("source", "world", "extra"),
    [
        *((FORMATS[0], world, []) for world in (1, 2, 3)),
        *((one, 2, []) for one in FORMATS[1:]),
        (FORMATS[0], 2, ["sharding.strategy=zero1"]),
        (FORMATS[0], 2, ["offload.tier=optimizer:cpu"]),
    ],
)
def test_a_run_continues_where_the_other_trainer_stopped(
    source: str, world: int, extra: list[str], ranks: Any, tmp_path: Path
) -> None:
    _, snapshot, target = taken_over(FIXTURES / source, run_of(tmp_path))
    write_checkpoint(snapshot, str(tmp_path / "imported"), plan=target.plan)
    run = tmp_path / "run.toml"
    expected, weights = ranks(1).run(trained, run, None, [])[0]
    losses, moved = ranks(world).run(trained, run, tmp_path / "imported", extra)[0]
    assert losses == pytest.approx(expected[-len(losses) :], rel=1e-5)
    assert len(losses) == LAST - snapshot.step
    for name, tensor in moved.items():
        assert (tensor - weights[name]).norm() / weights[name].norm() <= 1e-5, name
