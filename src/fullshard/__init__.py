"""fullshard: sharded training for PyTorch models that no longer fit on one accelerator.

    run = fullshard.Run.load("run.toml")
    with fullshard.process_group() as ranks:
        plan = fullshard.call_on_rank_zero(make_plan)  # calls fullshard.describe and fullshard.plan
        model = fullshard.shard(model, plan)
        state = fullshard.TrainState(model, fullshard.build_optimizer(model, plan), data=data)
        for step in fullshard.train(state, plan):
            ...

Names are imported on first use: `import fullshard` alone does not import torch.
The examples in the docstrings of these functions, where `fs` is this package, belong to one small run.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.checkpoint import BackgroundSaver as BackgroundSaver
    from fullshard.checkpoint import latest_checkpoint as latest_checkpoint
    from fullshard.checkpoint import load as load
    from fullshard.checkpoint import location_of as location_of
    from fullshard.checkpoint import save as save
    from fullshard.data.build import build_data as build_data
    from fullshard.data.build import resolve_epochs as resolve_epochs
    from fullshard.distributed.agreement import call_on_rank_zero as call_on_rank_zero
    from fullshard.distributed.sequence_parts import cut_sequences as cut_sequences
    from fullshard.errors import FullshardError as FullshardError
    from fullshard.launch.detect import detect_hardware as detect_hardware
    from fullshard.models.adapters import adapters_off as adapters_off
    from fullshard.models.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
    from fullshard.models.decoder import DecoderModel as DecoderModel
    from fullshard.models.huggingface import meta_model as meta_model
    from fullshard.models.loss import next_token_loss as next_token_loss
    from fullshard.parallel.materialize import materialize as materialize
    from fullshard.parallel.materialize import parameters_on_meta as parameters_on_meta
    from fullshard.parallel.mesh import process_group as process_group
    from fullshard.parallel.model_parameters import MissingWeightsWarning as MissingWeightsWarning
    from fullshard.planner.describe.describe import describe as describe
    from fullshard.planner.predict.memory import peak_bytes as peak_bytes
    from fullshard.planner.search.search import plan as plan
    from fullshard.planner.search.search import predict as predict
    from fullshard.planner.search.search import search as search
    from fullshard.report.plan import plan_page as plan_page
    from fullshard.spec.machine.catalog import hardware_on as hardware_on
    from fullshard.spec.machine.hardware import Hardware as Hardware
    from fullshard.spec.model import ModelSpec as ModelSpec
    from fullshard.spec.plan import Plan as Plan
    from fullshard.spec.run import Run as Run
    from fullshard.spec.settings.model_section import DecoderConfig as DecoderConfig
    from fullshard.training.between_steps import averaged_weights as averaged_weights
    from fullshard.training.generate import generate as generate
    from fullshard.training.loop import Step as Step
    from fullshard.training.loop import train as train
    from fullshard.training.optimizer import build_optimizer as build_optimizer
    from fullshard.training.shard import shard as shard
    from fullshard.training.state import TrainState as TrainState
    from fullshard.weights.export import export as export
    from fullshard.weights.export import full_state as full_state
    from fullshard.weights.export_hf import export_hf as export_hf
    from fullshard.weights.export_peft import export_peft as export_peft
    from fullshard.weights.hand_off import iterate_weights as iterate_weights
    from fullshard.weights.pretrained import load_pretrained as load_pretrained

__version__ = "0.1.0"

# Module -> the names that it defines.
_NAMES = {
    "checkpoint": "BackgroundSaver latest_checkpoint load location_of save",
    "data.build": "build_data resolve_epochs",
    "distributed.agreement": "call_on_rank_zero",
    "distributed.sequence_parts": "cut_sequences",
    "errors": "FullshardError",
    "launch.detect": "detect_hardware",
    "models.adapters": "adapters_off",
    "models.chunked_loss": "chunked_cross_entropy",
    "models.decoder": "DecoderModel",
    "models.huggingface": "meta_model",
    "models.loss": "next_token_loss",
    "parallel.materialize": "materialize parameters_on_meta",
    "parallel.mesh": "process_group",
    "parallel.model_parameters": "MissingWeightsWarning",
    "planner.describe.describe": "describe",
    "planner.predict.memory": "peak_bytes",
    "planner.search.search": "plan predict search",
    "report.plan": "plan_page",
    "spec.machine.catalog": "hardware_on",
    "spec.machine.hardware": "Hardware",
    "spec.model": "ModelSpec",
    "spec.plan": "Plan",
    "spec.run": "Run",
    "spec.settings.model_section": "DecoderConfig",
    "training.between_steps": "averaged_weights",
    "training.generate": "generate",
    "training.loop": "Step train",
    "training.optimizer": "build_optimizer",
    "training.shard": "shard",
    "training.state": "TrainState",
    "weights.export": "export full_state",
    "weights.export_hf": "export_hf",
    "weights.hand_off": "iterate_weights",
    "weights.export_peft": "export_peft",
    "weights.pretrained": "load_pretrained",
}
_HOMES = {name: f"fullshard.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
