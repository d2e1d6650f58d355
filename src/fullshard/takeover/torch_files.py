"""Files of torch.save: of programs and Lightning; in directories of Accelerate and transformers' Trainer."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open

from fullshard.errors import CheckpointError
from fullshard.quantities import join_names
from fullshard.takeover import dcp
from fullshard.takeover.optimizer_state import (
    LIGHTNING,
    as_number,
    check_is_alone,
    count_steps,
    count_steps_of_program,
    make_lightning,
    read_optimizer_dict,
    state_tensors,
)
from fullshard.takeover.rank_files import find_files, join_files, split_flat_parameters
from fullshard.takeover.source import TRAINER, ForeignCheckpoint, LazyTensor, read_trainer_files
from fullshard.takeover.stand_ins import read_torch_file
from fullshard.weights.files import FileTensor, find_weights_file, open_pretrained_files

_MODEL = ("model", "state_dict", "model_state_dict", "module")
_TRAINED = "current_model_state"  # beside `state_dict`, the average of Lightning's callback
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
# In directories of Accelerate and Trainer: DCP, and files by name or by number.
_DCP_WEIGHTS, _WEIGHT_FILES = "pytorch_model_fsdp_0", ("pytorch_model_fsdp.bin", "pytorch_model.bin")
_DCP_OPTIMIZER, _OPTIMIZER_FILES = "optimizer_0", ("optimizer.bin", "optimizer.pt")


def recognises(path: Path) -> bool:
    """Returns whether `path` is a file, a directory of Accelerate or Trainer, or one file of each rank."""
    return path.is_file() or _is_of_library(path) or bool(find_files(path))


def _is_of_library(path: Path) -> bool:
    """Returns whether `path` is a directory of Accelerate or Trainer."""
    return any((path / one).exists() for one in (_DCP_OPTIMIZER, *_OPTIMIZER_FILES, TRAINER))


def open_source(path: Path) -> ForeignCheckpoint:
    """Opens files of torch.save. Tensors are views of mapped files. Raises CheckpointError."""
    return _open_directory(path) if _is_of_library(path) else _open_files(find_files(path) or [path])


def _open_files(files: Sequence[Path]) -> ForeignCheckpoint:
    """Returns what the dict in the files holds below the usual keys, or the weights that it is."""
    content = join_files(files)
    content = cast(dict[str, Any], content if isinstance(content, dict) else {})
    check_is_alone(name for name in content if "." not in str(name))
    optimizer = read_optimizer_dict(_get_one(content, _OPTIMIZER) or {})
    model = content.get(_TRAINED) or _get_one(content, _MODEL)
    model = model or {k: v for k, v in content.items() if k != "step"}
    weights = state_tensors(split_flat_parameters(model, optimizer.moments))
    if not weights:
        got, fix = join_names([*map(str, content)], most=5), f"weights below {', '.join(_MODEL)}"
        raise CheckpointError(f"{files[0]} holds no weights that are known here.", got=got, fix=fix)
    reported = as_number(content.get("step", content.get("global_step")))
    step, notes = count_steps_of_program(optimizer.updates, reported)
    known = {*_MODEL, _TRAINED, *_OPTIMIZER, *weights, "step", "global_step"}
    unread = [str(key) for key in content if key not in known]
    notes = (*notes, f"not taken: {join_names(unread)}") if unread else notes
    if LIGHTNING in content:
        return make_lightning(optimizer, weights, content=content, files=tuple(files), notes=notes)
    name = "torch.save" if len(files) == 1 else "torch.save, one file per rank"
    return ForeignCheckpoint(optimizer, weights, step, format=name, files=tuple(files), notes=notes)


def _get_one(content: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Returns the dict below one of the keys, or what is alone in a list there; None without one."""
    found: list[Any] = []
    for key in keys:
        one: Any = content.get(key)
        found += one if isinstance(one, list) else [one] if isinstance(one, dict) else []
    if len(found) > 1:
        got, fix = join_names([key for key in keys if key in content]), "a file with one of each"
        raise CheckpointError("the source has several models or optimizers.", got=got, fix=fix)
    return found[0] if found else None


def _open_directory(path: Path) -> ForeignCheckpoint:
    """Opens a directory of Accelerate's `save_state` or of transformers' Trainer."""
    check_is_alone(one.name for one in path.iterdir())
    model, files = _read_weights(path)
    if (path / _DCP_OPTIMIZER).is_dir():
        table = dcp.read_dcp_directory(path / _DCP_OPTIMIZER)
        optimizer, files = table.read_optimizer([*model]), (*files, *table.files)
    else:
        file = next((path / one for one in _OPTIMIZER_FILES if (path / one).is_file()), None)
        if file is None:
            why, fix = "it was saved with save_only_model", f'for the weights alone, model.hf = "{path}"'
            raise CheckpointError(f"{path} has no state of an optimizer.", why=why, fix=fix)
        optimizer, files = read_optimizer_dict(read_torch_file(file)), (*files, file)
    updates, is_numbered = optimizer.updates, optimizer.has_numbered_moments
    weights = state_tensors(split_flat_parameters(model, optimizer.moments))
    settings, state = read_trainer_files(path)
    if state is None:
        return ForeignCheckpoint(
            optimizer,
            weights,
            count_steps(updates, None),
            format="Accelerate",
            files=files,
            has_order=not (is_numbered and files[0].suffix == ".safetensors"),
            settings=settings,
        )
    step = int(state["global_step"])
    skipped = step - int(max(updates.values(), default=step)) if (path / "scaler.pt").exists() else 0
    return ForeignCheckpoint(
        optimizer,
        weights,
        count_steps(updates, step, skipped=max(skipped, 0)),
        format="Trainer of transformers",
        files=(*files, path / TRAINER),
        default_order="decay-first" if is_numbered else None,
        has_order=not is_numbered,
        tokens=state.get("num_input_tokens_seen") or None,
        skipped_steps=skipped,
        settings=settings,
    )


def _read_weights(path: Path) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Returns the weights in a directory of Accelerate or Trainer, and their files."""
    if (path / _DCP_WEIGHTS).is_dir():
        table = dcp.read_dcp_directory(path / _DCP_WEIGHTS)
        return table.select_weights(), table.files
    file = next((path / one for one in _WEIGHT_FILES if (path / one).is_file()), None)
    if file is not None and find_weights_file(path) is None:
        return read_torch_file(file), (file,)
    if of_ranks := find_files(path):  # FSDP1's local state
        return join_files(of_ranks), tuple(of_ranks)
    every = open_pretrained_files(path).tensors
    tensors = {name: one for name, one in every.items() if isinstance(one, FileTensor)}
    files = {one.file: path / one.file for one in tensors.values()}
    handles = {name: safe_open(file, framework="pt") for name, file in files.items()}
    return {
        name: LazyTensor(one.shape, one.dtype, partial(handles[one.file].get_tensor, name))
        for name, one in tensors.items()
    }, tuple(files.values())
