"""Files of torch.save that each rank wrote of its shards: ShardedTensors of FSDP1."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import join_names
from fullshard.takeover.source import LazyTensor, SavedBox
from fullshard.takeover.stand_ins import StandInTensor, read_torch_file

_NAME = re.compile(r"(.*?rank[_-]?)(\d+)((?:\D.*)?\.(?:pt|pth|bin|ckpt))")
_SHARDED = "torch.distributed._shard"
_TENSORS = [f"{_SHARDED}.sharded_tensor.api.ShardedTensor"]
_CLASSES = [
    *(f"{_SHARDED}.sharded_tensor.metadata.{name}" for name in ("MEM_FORMAT_ENCODING", "TensorProperties")),
    f"{_SHARDED}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARDED}.sharded_tensor.shard.Shard",
    f"{_SHARDED}.metadata.ShardMetadata",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
]


def find_files(path: Path) -> list[Path]:
    """Returns the files of all ranks, in their order: those like the file `path`, or in the directory.

    The list is empty if the path has no such file. Raises CheckpointError for files of several kinds in the
    directory, and for a missing rank.
    """
    if not path.exists() or (path.is_file() and _NAME.fullmatch(path.name) is None):
        return []
    found: dict[tuple[str, str], dict[int, Path]] = {}
    for one in sorted((path.parent if path.is_file() else path).iterdir()):
        if one.is_file() and (match := _NAME.fullmatch(one.name)) is not None:
            found.setdefault((match[1], match[3]), {})[int(match[2])] = one
    kinds = [ranks for ranks in found.values() if path.is_dir() or path in ranks.values()]
    if len(kinds) > 1:
        names = ", ".join(f"{begin}…{end}" for begin, end in found)
        raise CheckpointError(f"{path} holds files of several kinds.", got=names, fix="one of the files")
    ranks = kinds[0] if kinds else {}
    if missing := set(range(len(ranks))) - ranks.keys():
        raise _missing_rank_error(next(iter(ranks.values())), min(missing))
    return [ranks[rank] for rank in sorted(ranks)]


def join_files(files: Sequence[Path]) -> Any:
    """Returns the content of the files, with a LazyTensor in place of the shards of each tensor."""
    content = [read_torch_file(one, classes=_CLASSES, tensor_classes=_TENSORS) for one in files]
    return _join(content, "", files=files)


def _join(values: Sequence[Any], name: str, *, files: Sequence[Path]) -> Any:
    """Returns what the `values` of all ranks are together. Every value except a tensor is rank 0's.

    Whole tensors that differ, such as random states, raise CheckpointError when they are read.
    """
    first = values[0]
    if isinstance(first, dict):
        keys = cast(dict[Any, Any], first).keys()
        if flat := [key for key in keys if str(key).endswith("_flat_param")]:
            what = f"{files[0]} is a local state dict of FSDP1."
            why = "flat parameters have no names, and parts of parameters no shapes"
            fix = "StateDictType.SHARDED_STATE_DICT in the program that saves"
            raise CheckpointError(what, got=join_names(flat, most=2), why=why, fix=fix)
        for value, file in zip(values, files, strict=True):
            if not isinstance(value, dict) or value.keys() != keys:
                raise CheckpointError(f"{file} holds other names than {files[0].name}.", got=f"in {name!r}")
        return {key: _join([one[key] for one in values], f"{name}.{key}", files=files) for key in keys}
    if isinstance(first, StandInTensor):
        return _join_sharded_tensors(values, name, files=files)
    if isinstance(first, DTensor):
        fix = "a checkpoint that DCP writes"
        raise CheckpointError(f"{files[0]} holds DTensors of one rank.", got=name, fix=fix)
    if isinstance(first, Tensor) and (others := [one for one in values[1:] if not torch.equal(first, one)]):
        what, fix = f"{name.removeprefix('.')} differs between the files of the ranks.", "files of one step"
        error = CheckpointError(what, why="it is a whole tensor in each, and no shard", fix=fix)
        return LazyTensor.from_tensor(first).check_equal_when_read(LazyTensor.from_tensor(others[0]), error)
    return first


def _join_sharded_tensors(values: Sequence[Any], name: str, *, files: Sequence[Path]) -> LazyTensor:
    boxes: list[SavedBox] = []
    for rank, (value, file) in enumerate(zip(values, files, strict=True)):
        shards, _, place, *_ = value.state
        if place.state["global_world_size"] > len(files):
            raise _missing_rank_error(file, len(files))
        if place.state["global_rank"] != rank:
            got = f"of rank {place.state['global_rank']}, in the place of rank {rank}"
            raise CheckpointError(f"{file} is a file of another rank.", got=got, fix="its own name")
        for shard in shards:
            where = shard.state["metadata"].state
            read = partial(Tensor.detach, shard.state["tensor"])
            boxes.append(SavedBox(tuple(where["shard_offsets"]), tuple(where["shard_sizes"]), read))
    shape, dtype = tuple(values[0].state[1].state["size"]), values[0].dtype
    return LazyTensor.from_boxes(name, boxes, shape=shape, dtype=dtype)


def _missing_rank_error(file: Path, rank: int) -> DamagedCheckpointError:
    why, fix = "each rank wrote a file with its own shards", "the files of all ranks in one directory"
    return DamagedCheckpointError(f"the file of rank {rank} is missing beside {file}.", why=why, fix=fix)
