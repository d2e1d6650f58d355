"""Host time of a training step outside model and FSDP2: reading the loss, clipping, the schedule."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fullshard.calibration.collectives import seconds_of, silence
from fullshard.models.decoder import DecoderModel
from fullshard.sharding.apply import shard
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.loss import next_token_loss
from fullshard.training.optimizer import build_optimizer
from fullshard.training.state import TrainState

# A tiny model whose computing takes almost no time, with the parameters of a few blocks.
_RUN = (
    "model.vocabulary=16",
    "model.d_model=16",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=2",
    "model.d_ff=16",
    "data.sequence_length=4",
    "train.microbatch=1",
    "train.steps=1000000",
    "precision.mode=fp32",
)


class _SameBatch:
    """A source of microbatches (`data.Batches`) without any cost."""

    def __init__(self, length: int) -> None:
        self.batch = {name: torch.zeros(1, length, dtype=torch.long) for name in ("tokens", "labels")}

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        """Returns the same microbatch for every step and rank."""
        return iter([self.batch] * plan.accumulation)


def measure_step(mesh: DeviceMesh, *, seconds: float) -> float:
    """Returns the seconds of a step of `train` minus its forward and backward, on a tiny model. Collective.

    This includes the collectives of the norm and of the loss, and the update of a few parameters.
    """
    run = Run.load(overrides=[*_RUN, f"train.global_batch={mesh.size()}"])
    plan = Plan.from_run(run, world_size=mesh.size(), device="cuda" if mesh.device_type == "cuda" else "cpu")
    with torch.device("meta"):
        model = DecoderModel(run.decoder)
    shard(model, plan)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            silence(module)
    data = _SameBatch(run.data.sequence_length)
    steps = train(TrainState(model, build_optimizer(model, plan), data=data), plan)
    whole = seconds_of(lambda: next(steps), mesh=mesh, seconds=seconds / 2)
    here = {name: tensor.to(mesh.device_type) for name, tensor in data.batch.items()}

    def inner() -> None:
        total, _ = next_token_loss(model, here)
        total.backward()

    bare = seconds_of(inner, mesh=mesh, seconds=seconds / 2)
    return max(whole - bare, 0.0)
