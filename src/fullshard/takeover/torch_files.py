"""Files of torch.save: of programs and Lightning; in directories of Accelerate and transformers' Trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import join_names
from fullshard.system.small_files import VALUE_BYTES, parse_json, read_bytes
from fullshard.takeover import dcp, optimizer_state, rank_files
from fullshard.takeover.source import ForeignCheckpoint, LazyTensor
from fullshard.takeover.stand_ins import read_torch_file
from fullshard.weights.files import FileTensor, find_weights_file, open_pretrained_files

_MODEL = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
_SCHEDULE = ("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict")
# In directories of Accelerate and Trainer: DCP, and files by name or by number.
_DCP_WEIGHTS, _WEIGHT_FILES = "pytorch_model_fsdp_0", ("pytorch_model_fsdp.bin", "pytorch_model.bin")
_DCP_OPTIMIZER, _OPTIMIZER_FILES = "optimizer_0", ("optimizer.bin", "optimizer.pt")
_SCHEDULE_FILES, _TRAINER = ("scheduler.pt", "scheduler.bin"), "trainer_state.json"


def recognises(path: Path) -> bool:
    """Returns whether `path` is a file, a directory of Accelerate or Trainer, or one file of each rank."""
    names = (_DCP_OPTIMIZER, *_OPTIMIZER_FILES)
    return path.is_file() or any((path / one).exists() for one in names) or bool(rank_files.find_files(path))


def open_source(path: Path) -> ForeignCheckpoint:
    """Opens files of torch.save. Tensors are views of mapped files. Raises CheckpointError."""
    if files := rank_files.find_files(path):
        return _from_content(rank_files.join_files(files), files)
    return _open_directory(path) if path.is_dir() else _from_content(read_torch_file(path), [path])


def _from_content(content: Any, files: Sequence[Path]) -> ForeignCheckpoint:
    """Returns what a dict holds below the usual keys, or the weights that it is."""
    content = cast(dict[str, Any], content if isinstance(content, dict) else {})
    optimizer_state.check_is_alone(name for name in content if "." not in str(name))
    weights = optimizer_state.state_tensors(_first(content, _MODEL) or content)
    if not weights:
        got, fix = join_names([*map(str, content)], most=5), f"weights below {', '.join(_MODEL)}"
        raise CheckpointError(f"{files[0]} holds no weights that are known here.", got=got, fix=fix)
    if flat := [name for name in weights if name.endswith("_flat_param")]:
        what = f"{files[0]} is a local state dict of FSDP1."
        why = "flat parameters have neither the names nor the shapes of the parameters in them"
        fix = "StateDictType.SHARDED_STATE_DICT in the program that saves"
        raise CheckpointError(what, got=join_names(flat, most=2), why=why, fix=fix)
    moments, count, groups, is_numbered = optimizer_state.read_optimizer_dict(
        _first(content, _OPTIMIZER) or {}
    )
    step = optimizer_state.as_number(_first(content, ("step", "global_step"))) if count is None else count
    found = ForeignCheckpoint(
        format="torch.save" if len(files) == 1 else "torch.save, one file per rank",
        files=tuple(files),
        weights=weights,
        moments=moments,
        step=-1 if step is None else int(step),
        has_numbered_moments=is_numbered,
        update_count=count,
        groups=groups,
        schedule_position=optimizer_state.as_number((_first(content, _SCHEDULE) or {}).get("last_epoch")),
    )
    is_lightning = "pytorch-lightning_version" in content
    return optimizer_state.as_lightning(found, content, file=files[0]) if is_lightning else found


def _first(content: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Returns the value of the first key that exists, or what is alone in the list there."""
    found = next((content[key] for key in keys if content.get(key) is not None), None)
    if isinstance(found, list) and len(cast(list[Any], found)) > 1:
        raise CheckpointError("the source has several optimizers or schedules.", fix="a run with one")
    return found[0] if isinstance(found, list) and found else found


def _open_directory(path: Path) -> ForeignCheckpoint:
    """Opens a directory of Accelerate's `save_state` or of transformers' Trainer."""
    optimizer_state.check_is_alone(one.name for one in path.iterdir())
    weights, files = _read_weights(path)
    is_numbered = False
    if (path / _DCP_OPTIMIZER).is_dir():
        table = dcp.read_dcp_directory(path / _DCP_OPTIMIZER)
        moments, count = table.read_moments()
        groups, files = table.read_groups([*weights]), (*files, *table.files)
    else:
        file = next(path / one for one in _OPTIMIZER_FILES if (path / one).is_file())
        moments, count, groups, is_numbered = optimizer_state.read_optimizer_dict(read_torch_file(file))
        files = (*files, file)
    schedule = next((path / one for one in _SCHEDULE_FILES if (path / one).is_file()), None)
    position = read_torch_file(schedule).get("last_epoch") if schedule else None
    found = ForeignCheckpoint(
        format="Accelerate",
        files=files,
        weights=weights,
        moments=moments,
        step=-1 if count is None else int(count),
        has_numbered_moments=is_numbered,
        update_count=count,
        groups=groups,
        schedule_position=optimizer_state.as_number(position),
        settings={"model.hf": str(path)} if (path / "config.json").is_file() else {},
    )
    return _as_trainer(found, path) if (path / _TRAINER).is_file() else found


def _as_trainer(found: ForeignCheckpoint, path: Path) -> ForeignCheckpoint:
    try:
        state: Any = parse_json(read_bytes(path / _TRAINER, most_bytes=VALUE_BYTES))
        step, steps = int(state["global_step"]), int(state["max_steps"])
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{path / _TRAINER} cannot be read.", got=str(error)) from error
    where, may_skip = f"global_step of {_TRAINER}", (path / "scaler.pt").exists()
    optimizer_state.check_same_step(found, step, where=where, may_skip=may_skip)
    return replace(
        found,
        format="Trainer of transformers",
        files=(*found.files, path / _TRAINER),
        step=step,
        skipped_steps=0 if found.update_count is None else step - int(found.update_count),
        tokens=state.get("num_input_tokens_seen") or None,
        default_order="decay-first" if found.has_numbered_moments else None,
        settings={**found.settings, "train.steps": steps},
    )


def _read_weights(path: Path) -> tuple[dict[str, LazyTensor], tuple[Path, ...]]:
    """Returns the weights in a directory of Accelerate or Trainer, and their files."""
    if (path / _DCP_WEIGHTS).is_dir():
        found = dcp.open_source(path / _DCP_WEIGHTS)
        return dict(found.weights), found.files
    file = next((path / one for one in _WEIGHT_FILES if (path / one).is_file()), None)
    if file is not None and find_weights_file(path) is None:
        return optimizer_state.state_tensors(read_torch_file(file)), (file,)
    every = open_pretrained_files(path).tensors
    tensors = {name: one for name, one in every.items() if isinstance(one, FileTensor)}
    files = {one.file: path / one.file for one in tensors.values()}
    handles = {name: safe_open(file, framework="pt") for name, file in files.items()}
    return {
        name: LazyTensor(one.shape, one.dtype, partial(handles[one.file].get_tensor, name))
        for name, one in tensors.items()
    }, tuple(files.values())
