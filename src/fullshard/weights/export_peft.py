"""export_peft: writes a checkpoint's adapters as a directory for peft's `PeftModel.from_pretrained`."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fullshard.checkpoint.load import resolve_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.distributed.agreement import run_alone_or_raise
from fullshard.errors import CheckpointError
from fullshard.models.adapters import ADAPTER, make_lora_config
from fullshard.spec.model_section import HuggingFaceModel
from fullshard.spec.weight_map import Shape, WeightMap, map_unchanged_tensor
from fullshard.system import disk
from fullshard.weights.export import export, names_without_wrappers
from fullshard.weights.export_hf import transposed_module_names
from fullshard.weights.tensor_source import ADDED

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_WITHIN = "base_model.model."  # prefix of the adapted model inside peft's model


def export_peft(checkpoint: str | Path | CheckpointLocation, directory: str | Path) -> None:
    """Writes a checkpoint's adapters, and the modules that were trained whole, without the base model.

    `PeftModel.from_pretrained(base, directory)` loads them. Raises CheckpointError for a checkpoint without
    adapters; MissingExtraError without peft.
    """
    _, manifest = resolve_checkpoint(checkpoint)
    run = manifest.run_settings
    plain = names_without_wrappers(manifest.model_tensors)
    adapted = sorted({name.partition(ADDED)[0] for name in plain.values() if ADDED in name})
    if run is None or run.adapter.rank == 0 or not adapted:
        raise CheckpointError(
            f"{checkpoint} holds no adapters.",
            got="no [adapter] in its run",
            fix="--format hf, which writes the whole model",
        )
    turned = {name.removeprefix("model.") for name in transposed_module_names(manifest, run)}
    config: Any = make_lora_config(run.adapter, targets=adapted, turned=bool(turned & set(adapted)))
    config.base_model_name_or_path = run.model.hf if isinstance(run.model, HuggingFaceModel) else None
    config.inference_mode = True
    config.modules_to_save = list(run.adapter.trained) or None
    items: Mapping[str, Any] = config.to_dict()
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in items.items()}
    target = Path(directory)
    export(checkpoint, target / _WEIGHTS, naming=partial(_map_trained_tensors, trained=run.adapter.trained))

    def write_config() -> None:
        with disk.open_atomic_replacement(target / _CONFIG) as file:
            file.write(json.dumps(values, indent=2, sort_keys=True).encode())

    run_alone_or_raise(write_config, doing=f"exporting {checkpoint} to {target}")


def _map_trained_tensors(shapes: Mapping[str, Shape], *, trained: tuple[str, ...]) -> WeightMap:
    """Maps the adapters and the modules whose names end in one of `trained` to peft's names in files.

    Names in files lack the adapter's name, which peft's names in a model contain.
    """
    names = {
        f"{_WITHIN}{name.replace(f'.{ADAPTER}', '')}": name
        for name in shapes
        if ADDED in name or any(f".{end}." in f".{name}" for end in trained)
    }
    return WeightMap(
        parts={new: map_unchanged_tensor(name, shapes[name]) for new, name in names.items()},
        shapes={new: shapes[name] for new, name in names.items()},
    )
