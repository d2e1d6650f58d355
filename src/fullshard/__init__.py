"""fullshard: sharded training for PyTorch models that no longer fit one accelerator.

    run = fullshard.Run.load("run.toml")
    with fullshard.process_group() as ranks:
        plan = fullshard.Plan.from_run(run, world_size=ranks.world_size)
        model = fullshard.shard(model, plan)
        state = fullshard.TrainState(model, fullshard.build_optimizer(model, plan), data=data)
        for step in fullshard.train(state, plan):
            ...

Names are imported when they are first used: `import fullshard` alone does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.checkpoint import export as export
    from fullshard.checkpoint import load as load
    from fullshard.checkpoint import newest as newest
    from fullshard.checkpoint import save as save
    from fullshard.errors import FullshardError as FullshardError
    from fullshard.models.decoder import DecoderModel as DecoderModel
    from fullshard.sharding.apply import shard as shard
    from fullshard.sharding.describe import describe as describe
    from fullshard.sharding.given import InitialisedWarning as InitialisedWarning
    from fullshard.sharding.layout import layout as layout
    from fullshard.sharding.materialize import materialize as materialize
    from fullshard.sharding.materialize import parameters_on_meta as parameters_on_meta
    from fullshard.sharding.mesh import process_group as process_group
    from fullshard.sharding.unit_sizes import UnitSizeWarning as UnitSizeWarning
    from fullshard.spec.plan import Plan as Plan
    from fullshard.spec.run import Decoder as Decoder
    from fullshard.spec.run import Run as Run
    from fullshard.training.data import build_data as build_data
    from fullshard.training.loop import Step as Step
    from fullshard.training.loop import train as train
    from fullshard.training.loss import next_token_loss as next_token_loss
    from fullshard.training.optimizer import build_optimizer as build_optimizer
    from fullshard.training.state import TrainState as TrainState

__version__ = "0.1.0"

_HOMES = {
    "export": "checkpoint",
    "load": "checkpoint",
    "newest": "checkpoint",
    "save": "checkpoint",
    "FullshardError": "errors",
    "DecoderModel": "models.decoder",
    "shard": "sharding.apply",
    "describe": "sharding.describe",
    "layout": "sharding.layout",
    "materialize": "sharding.materialize",
    "parameters_on_meta": "sharding.materialize",
    "process_group": "sharding.mesh",
    "InitialisedWarning": "sharding.given",
    "UnitSizeWarning": "sharding.unit_sizes",
    "Plan": "spec.plan",
    "Decoder": "spec.run",
    "Run": "spec.run",
    "build_data": "training.data",
    "Step": "training.loop",
    "train": "training.loop",
    "next_token_loss": "training.loss",
    "build_optimizer": "training.optimizer",
    "TrainState": "training.state",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fullshard.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
