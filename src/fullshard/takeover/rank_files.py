"""Files of torch.save that each rank wrote of its parts: ShardedTensors of FSDP1, flat vectors."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.takeover.source import LazyTensor, SavedBox
from fullshard.takeover.stand_ins import StandInTensor, read_torch_file

_NAME = re.compile(r"(.*?rank[_-]?)(\d+)((?:\D.*)?\.(?:pt|pth|bin|ckpt))")
_FLAT = "_flat_param"  # end of the name of a flat parameter, one per FSDP1 unit
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

Tensors = dict[str, LazyTensor]


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
    """Returns the content of the files, with a LazyTensor in place of the shards of each tensor.

    In the place of a flat parameter, see `split_flat_parameters`, is a list of {"": part of each rank}.
    """
    content = [read_torch_file(one, classes=_CLASSES, tensor_classes=_TENSORS) for one in files]
    return _join(content, "", files=files)


def _join(values: Sequence[Any], name: str, *, files: Sequence[Path]) -> Any:
    """Returns what the `values` of all ranks are together. Every value except a tensor is rank 0's.

    Whole tensors that differ, such as random states, raise CheckpointError when they are read.
    """
    first = values[0]
    if isinstance(first, dict):
        keys = cast(dict[Any, Any], first).keys()
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


def _join_sharded_tensors(values: Sequence[Any], name: str, *, files: Sequence[Path]) -> Any:
    shape, dtype = tuple(values[0].state[1].state["size"]), values[0].dtype
    boxes: list[SavedBox] = []
    vectors = [{"": LazyTensor((0,), dtype, partial(torch.empty, 0, dtype=dtype))} for _ in files]
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
            vectors[rank][""] = LazyTensor(boxes[-1].shape, dtype, read)
    joined = LazyTensor.from_boxes(name, boxes, shape=shape, dtype=dtype)
    return vectors if name.endswith(_FLAT) else joined


def split_flat_parameters(
    weights: Mapping[str, Any], moments: Mapping[str, Mapping[str, LazyTensor]]
) -> dict[str, Any]:
    """Returns `weights`, with those in flat parameters of local state dicts of FSDP1 by their names.

    A flat parameter has the parameters of a unit one after another. `FSDP.optim_state_dict` gives the moments
    names and shapes, in this order. With use_orig_params, `weights` have the names in this order.
    Raises CheckpointError without such moments.
    """
    found = {name: one for name, one in weights.items() if not str(name).endswith(_FLAT)}
    names = [name for name in dict.fromkeys((*weights, *moments)) if name in moments]
    for flat in sorted(weights.keys() - found.keys(), key=len, reverse=True):  # inner units first
        vectors = weights[flat]
        own = [name for name in names if name.startswith(flat.removesuffix(_FLAT))]
        names = [name for name in names if name not in own]
        shapes = {name: next(iter(moments[name].values())).shape for name in own}
        sizes = [math.prod(shape) for shape in shapes.values()]
        size = sum(one[""].shape[0] for one in vectors)
        own_alignment = 16 // vectors[0][""].dtype.itemsize
        paddings = _find_paddings(sizes, size, ranks=len(vectors), alignments={own_alignment, 4, 8})
        if paddings is None:
            what = f"{flat} of a local state dict of FSDP1 cannot be divided into parameters."
            got, why = f"{size} elements, {sum(sizes)} in moments by name", "it has no names and no shapes"
            fix = "FSDP.optim_state_dict(model, optimizer) in the same file, or SHARDED_STATE_DICT"
            raise CheckpointError(what, got=got, why=why, fix=fix)
        divided = split_vectors(shapes, paddings, vectors=vectors)
        found |= {name: one[""] for name, one in divided.items()}
    return found


def _find_paddings(
    sizes: Sequence[int], size: int, *, ranks: int, alignments: Iterable[int]
) -> Sequence[int] | None:
    """Returns the number of elements after each parameter of a flat one; None if not one division fits.

    With use_orig_params, each parameter begins at a multiple of 16 bytes of the compute dtype, and the end
    is padded to a multiple of the ranks. `alignments`: 16 bytes of possible dtypes, in elements.
    """
    if sum(sizes) == size:
        return [0] * len(sizes)
    fitting: set[tuple[int, ...]] = set()
    for alignment in alignments:
        paddings = (*(-one % alignment for one in sizes[:-1]), 0)
        least = sum(sizes) + sum(paddings)
        if least + -least % ranks == size:
            fitting.add(paddings)
    return fitting.pop() if len(fitting) == 1 else None


def split_vectors(
    shapes: Mapping[str, Sequence[int]], paddings: Sequence[int], *, vectors: Sequence[Tensors]
) -> dict[str, Tensors]:
    """Returns the tensors, by name and kind, that lie one after another in a vector.

    Each rank has an equal part of the vector.

    paddings: number of elements after each tensor, for its alignment

    Raises DamagedCheckpointError if parts are missing.
    """
    size = max(one.shape[0] for own in vectors for one in own.values())  # the last may lack padding
    found: dict[str, Tensors] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end = begin + math.prod(shape)
        found[name] = {}
        for key, one in vectors[0].items():
            boxes: list[SavedBox] = []
            for at, own in zip(range(0, size * len(vectors), size), vectors, strict=True):
                first, last = max(begin, at), min(end, at + own[key].shape[0])
                if first < last:
                    part = cut_vector(own[key], first - at, length=last - first)
                    boxes.append(SavedBox((first - begin,), part.shape, part.read))
            flat = LazyTensor.from_boxes(name, boxes, shape=(end - begin,), dtype=one.dtype)
            read = partial(lambda flat, shape: flat.read().view(shape), flat, tuple(shape))
            found[name][key] = LazyTensor(tuple(shape), one.dtype, read)
        begin = end + padding
    return found


def cut_vector(vector: LazyTensor, begin: int, *, length: int) -> LazyTensor:
    """Returns `length` elements of a vector from `begin` on."""
    return LazyTensor((length,), vector.dtype, lambda: vector.read()[begin : begin + length])


def _missing_rank_error(file: Path, rank: int) -> DamagedCheckpointError:
    why, fix = "each rank wrote a file with its own shards", "the files of all ranks in one directory"
    return DamagedCheckpointError(f"the file of rank {rank} is missing beside {file}.", why=why, fix=fix)
