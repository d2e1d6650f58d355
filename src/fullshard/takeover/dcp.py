"""Directories of torch.distributed.checkpoint (DCP): of FSDP2 and FSDP1 programs, torchtitan and Lightning.

DCP joins the keys of nested dicts with dots: `optim.state.blocks.0.weight.exp_avg`. Its pickle `.metadata` is
read by `stand_ins.read_pickle`, and each tensor or value is a part of a file that torch.save wrote.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.takeover.optimizer_state import (
    LIGHTNING,
    as_number,
    check_is_alone,
    count_steps,
    count_steps_of_program,
    make_group,
    make_lightning,
    merge_equal_groups,
    split_steps,
)
from fullshard.takeover.source import ForeignCheckpoint, ForeignOptimizer, LazyTensor, SavedBox, change_names
from fullshard.takeover.stand_ins import read_pickle, read_torch_file, read_torch_part

METADATA = ".metadata"
_META = "meta.pt"  # beside it, in directories of Lightning and Fabric
_DCP = "torch.distributed.checkpoint.metadata"
_NAMES = "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata StorageMeta"
_CLASSES = [
    *(f"{_DCP}.{name}" for name in (*_NAMES.split(), "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
]
_DTYPES = {f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_OPTIMIZER = r"(?:app\.)?(?:optim|optimizer|optimizer_\d+)"  # `app` is the name in torch's tutorial
_STATE = re.compile(rf"^{_OPTIMIZER}\.state\.")
_GROUP = re.compile(rf"{_OPTIMIZER}\.param_groups\.(.+)\.([^.]+)")
_OF_MODEL = ("app.model.", "model.", "state_dict.")  # before names of weights; torchtitan has nothing
_COUNTS = r"step|global_step|epoch|tokens|train_state\..+|(?:lr_)?scheduler\..+"
_NOT_WEIGHTS = re.compile(rf"{_OPTIMIZER}\..+|{_COUNTS}")
_FIX_FOR_EQUAL_NAMES = "a source with one of them"


@dataclass(frozen=True)
class DcpDirectory:
    """The tensors and values in a directory of DCP, by name, and its files."""

    tensors: Mapping[str, LazyTensor]
    values: Mapping[str, Any]
    files: tuple[Path, ...]

    def read_value(self, *names: str) -> Any:
        """Returns the value of the first of `names` that exists, which may be a tensor; None for none."""
        for name in names:
            if name in self.values:
                return self.values[name]()
            if name in self.tensors:
                return self.tensors[name].read()
        return None

    def read_optimizer(self, names: Sequence[str]) -> ForeignOptimizer:
        """Returns the optimizer's state. `names`: all parameters, if groups do not list them.

        Raises CheckpointError for two states of one parameter, and for optimizers that fullshard lacks.
        """
        inside = self._names_of_states()
        states: dict[str, dict[str, LazyTensor]] = {}
        own = {name: self.tensors[name] for name in inside}
        for path, tensor in change_names(own, inside, fix=_FIX_FOR_EQUAL_NAMES).items():
            owner, _, key = path.rpartition(".")
            states.setdefault(owner, {})[key] = tensor
        moments, updates = split_steps(states)
        entries: dict[str, dict[str, Any]] = {}  # of groups: one per parameter in torchtitan
        for name in (*self.values, *self.tensors):
            if (match := _GROUP.fullmatch(name)) is not None:
                entries.setdefault(match[1], {})[match[2]] = self.read_value(name)
        of_key = {key: names if key.isdigit() else [key] for key in entries}
        groups = [make_group(e.get("params") or of_key[key], e) for key, e in entries.items()]
        return ForeignOptimizer(moments, updates, merge_equal_groups(groups))

    def _names_of_states(self) -> dict[str, str]:
        """Returns {name of a tensor of the optimizer: name of the parameter, a dot, and the key}."""
        return {name: _STATE.sub("", name) for name in self.tensors if _STATE.match(name)}

    def select_weights(self) -> dict[str, LazyTensor]:
        """Returns parameters and buffers, without the key that a model is below, and other tensors.

        Raises CheckpointError for two tensors that would have one name.
        """
        found = {name: one for name, one in self.tensors.items() if _NOT_WEIGHTS.fullmatch(name) is None}
        trained = {path.rpartition(".")[0] for path in self._names_of_states().values()}
        prefix = next((p for p in _OF_MODEL if any(name.startswith(p) for name in found)), "")
        if trained & found.keys():  # as in torchtitan, also if they begin with `model.`
            return found
        names = {name: name.removeprefix(prefix) for name in found}
        return change_names(found, names, fix=_FIX_FOR_EQUAL_NAMES)


def recognises(path: Path) -> bool:
    """Returns whether `path` is a directory of DCP, and not one of fullshard's own checkpoints."""
    return (path / METADATA).is_file() and not (path / MANIFEST).exists()


def open_source(path: Path) -> ForeignCheckpoint:
    """Opens a directory of DCP. Reads `.metadata` and small values; raises CheckpointError."""
    table = read_dcp_directory(path)
    weights = table.select_weights()
    optimizer, files, name = table.read_optimizer([*weights]), table.files, "DCP"
    file = path / _META
    if file.is_file() and LIGHTNING in (content := read_torch_file(file)):  # else, it is Fabric's
        return make_lightning(optimizer, weights, content=content, files=(*files, file))
    if (reported := as_number(table.read_value("train_state.step"))) is not None:
        name, step, notes = "torchtitan (DCP)", count_steps(optimizer.updates, reported), ()
    else:
        reported = as_number(table.read_value("step", "global_step"))
        step, notes = count_steps_of_program(optimizer.updates, reported)
    count = as_number(table.read_value("train_state.ntokens_seen", "tokens"))
    tokens = None if count is None else int(count)
    return ForeignCheckpoint(optimizer, weights, step, format=name, files=files, tokens=tokens, notes=notes)


def read_dcp_directory(path: Path) -> DcpDirectory:
    """Reads the `.metadata` of a directory, and checks that its files hold what it lists.

    Raises CheckpointError for names of files outside of the directory, and for compressed data;
    DamagedCheckpointError for missing and truncated files, and for tensors that are not whole.
    """
    metadata = read_pickle(path / METADATA, classes=_CLASSES, values=_DTYPES | {"torch.Size": torch.Size})
    stored: dict[str, dict[tuple[int, ...], Any]] = {}
    files = {path / METADATA}
    for index, info in metadata.state["storage_data"].items():
        file, part = _locate_part(path, info.state)
        files.add(file)
        stored.setdefault(index.state["fqn"], {})[tuple(index.state.get("offset") or ())] = part
    listed = metadata.state["state_dict_metadata"].items()
    tensors = {
        n: _make_tensor(n, one.state, parts=stored[n]) for n, one in listed if "chunks" in (one.state or {})
    }
    values = {n: next(iter(stored[n].values())) for n, _ in listed if n not in tensors}
    check_is_alone((*tensors, *values))
    return DcpDirectory(tensors, values, tuple(sorted(files)))


def _locate_part(directory: Path, info: Mapping[str, Any]) -> tuple[Path, Any]:
    """Returns the file of a stored item, and a function that reads the item."""
    name, begin, length = info["relative_path"], int(info["offset"]), int(info["length"])
    if not isinstance(name, str) or Path(name).name != name or info.get("transform_descriptors"):
        got = f"a file {name!r}, transforms {info.get('transform_descriptors')}"
        why = "the files of a checkpoint lie in its directory, and hold what torch.save writes"
        raise CheckpointError(f"{directory / METADATA} is not read.", got=got, why=why)
    path = directory / name
    size_bytes = path.stat().st_size if path.is_file() else -1
    if not 0 <= begin <= begin + length <= size_bytes:
        what = f"{path} is {'missing' if size_bytes < 0 else 'truncated'}."
        got = None if size_bytes < 0 else f"{size_bytes} bytes, {begin + length} listed in {METADATA}"
        why = "each rank wrote a file of its own"
        raise DamagedCheckpointError(what, got=got, why=why, fix="the files of all ranks in one directory")
    return path, partial(read_torch_part, path, begin=begin, length=length)


def _make_tensor(name: str, listed: Mapping[str, Any], *, parts: Mapping[tuple[int, ...], Any]) -> LazyTensor:
    dtype = next(one for one in listed["properties"].state if isinstance(one, torch.dtype))
    places = [(tuple(one.state["offsets"]), tuple(one.state["sizes"])) for one in listed["chunks"]]
    known = [(at, size, at if at in parts else ()) for at, size in places]
    boxes = [SavedBox(at, size, parts[key]) for at, size, key in known if key in parts]
    return LazyTensor.from_boxes(name, boxes, shape=tuple(listed["size"]), dtype=dtype)
