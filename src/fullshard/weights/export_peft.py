"""export_peft: writes a checkpoint's adapters as a directory for peft's `PeftModel.from_pretrained`."""

import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.load import resolve_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.errors import CheckpointError, SpecError
from fullshard.models import adapters
from fullshard.models.adapted_parameters import name_in_base
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.weight_map import Shape, WeightMap, map_unchanged_tensor
from fullshard.system.direct_io import open_atomic_replacement
from fullshard.system.files import os_errors_as_checkpoint_errors
from fullshard.weights.export import export, names_without_wrappers
from fullshard.weights.export_hf import build_base_and_adapted_meta_models, layer_merging_by_name
from fullshard.weights.names import full_transformers_config
from fullshard.weights.tensor_source import ADDED, Weights

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
logger = logging.getLogger("fullshard")
_WITHIN = "base_model.model."  # prefix of the adapted model inside peft's model


def export_peft(
    checkpoint: str | Path | CheckpointLocation, directory: str | Path, *, weights: Weights = "model"
) -> None:
    """Writes a checkpoint's adapters, and the modules that were trained whole, without the base model.

    `PeftModel.from_pretrained(base, directory)` loads them. With `weights` "ema", they are the averages.
    Raises CheckpointError for a checkpoint without adapters, or if peft would not load all that was trained;
    MissingExtraError without peft.

    >>> fs.export_peft("adapted", "adapter")
    >>> base = transformers.AutoModelForCausalLM.from_pretrained("llama")
    >>> adapted = peft.PeftModel.from_pretrained(base, "adapter")
    """
    _, manifest = resolve_checkpoint(checkpoint)
    run = manifest.run_settings
    plain = names_without_wrappers(manifest.model_tensors)
    if run is None or run.adapter.rank == 0 or not any(ADDED in name for name in plain.values()):
        raise CheckpointError(
            f"{checkpoint} holds no adapters.",
            got="no [adapter] in its run",
            fix="--format hf, which writes the whole model",
        )
    base, model = build_base_and_adapted_meta_models(manifest.values.get("huggingface"), run)
    config, trained = _make_checked_peft_config(run, model, base=base)
    _check_all_trained_are_saved(model, trained, saved=set(plain.values()))
    values = {key: sorted(one) if isinstance(one, set) else one for key, one in config.to_dict().items()}
    for line in _describe_changed_base(run):
        logger.warning(line)
    target = Path(directory)
    naming = partial(_map_trained_tensors, trained=trained)
    export(checkpoint, target / _WEIGHTS, naming=naming, weights=weights)
    path = target / _CONFIG
    with os_errors_as_checkpoint_errors(f"{path} cannot be written."), open_atomic_replacement(path) as file:
        file.write(json.dumps(values, indent=2, sort_keys=True).encode())


def describe_impossible_exports(run: Run, model: nn.Module) -> list[str]:
    """Returns lines about formats in which the adapters of `run` cannot be exported, and about their base.

    Called before a run starts. peft loads the exported names into a meta model.

    model: the model of `run` with adapters, on any device. Raises MissingExtraError without peft.
    """
    recorded = full_transformers_config(model)
    if run.adapter.rank == 0 or (recorded is None and not isinstance(run.model, DecoderConfig)):
        return []
    impossible = dict[str, object]()
    base, adapted = build_base_and_adapted_meta_models(recorded, run)
    checks = {  # peft changes the base, so it comes last
        "hf": lambda: layer_merging_by_name(adapted, base=base),
        "peft": lambda: _make_checked_peft_config(run, adapted, base=base),
    }
    for form, check in checks.items():
        try:
            check()
        except (CheckpointError, SpecError) as error:
            impossible[form] = error.got
    if run.adapter.saves_only_adapters:
        impossible["hf"] = 'adapter.save = "adapters" keeps no base'
    cannot = "the trained adapters cannot be exported with --format"
    lines = [f"{cannot} {form}: {why}" for form, why in impossible.items()]
    return [*lines, *_describe_changed_base(run)]


def _describe_changed_base(run: Run) -> list[str]:
    """Returns a line for each setting by which the base is not what `from_pretrained(model.hf)` loads."""
    section, changed = run.model, dict[str, Any]({"adapter.base_dtype": run.adapter.packed_format})
    if isinstance(section, HuggingFaceModel):
        given = section.model_dump(include={"architecture", "options", "weights"}, exclude_defaults=True)
        changed |= {f"model.{key}": value for key, value in given.items()}
    return [
        f"--format peft is for the base with {key} = {value!r}, and not as its files have it"
        for key, value in changed.items()
        if value not in (None, "require")
    ]


def _make_checked_peft_config(run: Run, model: nn.Module, *, base: nn.Module) -> tuple[Any, set[str]]:
    """Returns peft's config for the adapted meta model `model`, and the names of what is not frozen.

    Raises CheckpointError if peft would not load all that is trained into `base`, which it changes.
    """
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    trained = model.state_dict().keys() - frozen  # and buffers, which training may change
    config: Any = adapters.make_config_for_model(base, run.adapter)
    config.base_model_name_or_path = run.model.hf if isinstance(run.model, HuggingFaceModel) else None
    config.inference_mode = True
    config.modules_to_save = _list_modules_trained_whole(model, trained) or None
    shapes = {name: one.shape for name, one in (*model.named_parameters(), *model.named_buffers())}
    tensors = _map_trained_tensors(shapes, trained=trained).shapes
    # peft changes the config it is given.
    _load_with_peft_to_check(base, copy.deepcopy(config), tensors=tensors)
    return config, trained


def _check_all_trained_are_saved(model: nn.Module, trained: set[str], *, saved: set[str]) -> None:
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    absent = [sorted(own)[0] for own in names.values() if own & trained and not own & saved]
    if absent:
        raise CheckpointError(
            "the adapters cannot be written for peft.",
            got=f"{len(absent)} trained tensors that the checkpoint has not by name: {', '.join(absent[:4])}",
            why="what peft loads would compute something else than the trained model",
            fix="--format safetensors, which writes every tensor by its own name",
        )


def _list_modules_trained_whole(model: nn.Module, trained: set[str]) -> list[str]:
    """Returns the names of modules that peft can keep as `modules_to_save`, a copy beside the base's.

    peft takes every module whose name ends in a listed one (`subhead` for `head`), so full names are listed
    that no other name ends in. Other trained parameters, such as biases, weights below an adapter and tied
    ones, are not listed: peft loads these into the base model.
    """
    counts = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    whole = list[str]()
    for name, module in model.named_modules():
        own = {f"{name}.{key}": one for key, one in module.named_parameters(recurse=False)}
        is_alone = all(counts[id(one)] == 1 for one in own.values()) and not list(module.children())
        is_apart = ADDED not in f"{name}." and name_in_base(f"{name}.") == f"{name}."
        if own and own.keys() <= trained and is_alone and is_apart:
            whole.append(name)
    every = [name for name, _ in model.named_modules()]
    return [name for name in whole if [one for one in every if one.endswith(name)] == [name]]


def _map_trained_tensors(shapes: Mapping[str, Shape], *, trained: set[str]) -> WeightMap:
    """Maps the tensors named in `trained` to peft's names in files.

    Names in files lack the adapter's name, which peft's names in a model contain.
    """
    names = {f"{_WITHIN}{key.replace(f'.{adapters.ADAPTER}', '')}": key for key in shapes if key in trained}
    return WeightMap(
        parts={new: map_unchanged_tensor(name, shapes[name]) for new, name in names.items()},
        shapes={new: shapes[name] for new, name in names.items()},
    )


def _load_with_peft_to_check(base: nn.Module, config: Any, *, tensors: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless peft puts every exported tensor into `base`, which is on the meta device.

    config: peft's LoraConfig, as exported; tensors: shape of each tensor by its name in the file
    """
    peft = adapters.import_peft()
    values = {name: torch.empty(shape, device="meta") for name, shape in tensors.items()}
    try:
        with warnings.catch_warnings():
            # False for parameters: peft looks for modules of these names.
            warnings.filterwarnings("ignore", message=".*pattern keys did not match")
            kind = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
            model = kind(base, config, low_cpu_mem_usage=True)
        loaded = peft.set_peft_model_state_dict(model, values)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        lacking = [name for name in loaded.missing_keys if ADDED in name]
        problem = ", ".join([*loaded.unexpected_keys, *lacking][:4])
    if problem:
        raise CheckpointError(
            "the adapters cannot be written for peft.",
            got=problem,
            why="PeftModel.from_pretrained would load something else than the trained model, or nothing",
            fix="--format hf, which merges them, or --format safetensors",
        )
