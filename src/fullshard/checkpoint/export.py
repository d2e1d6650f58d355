"""A model as safetensors, one file or several with an index, which other programs read.

The format: eight bytes (little-endian) with the length of a JSON header; the header (name -> dtype, shape,
and the range of its bytes behind the header); the tensors' bytes, row-major and little-endian, without gaps.
https://github.com/huggingface/safetensors#format
Several files stand in a directory with `model.safetensors.index.json`, which names the file of each tensor.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import disk, storage
from fullshard.checkpoint.agreement import alone
from fullshard.checkpoint.load import find
from fullshard.checkpoint.manifest import MODEL_PREFIX, SavedTensor
from fullshard.checkpoint.place import Place
from fullshard.checkpoint.protocol import Checkpointable
from fullshard.errors import CheckpointError
from fullshard.quantities import format_bytes

_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

logger = logging.getLogger("fullshard")


def export(
    checkpoint: str | Path | Place,
    target: str | Path,
    *,
    shard_bytes: int | None = None,
    free_bytes: Callable[[Path], int] = disk.free_bytes,
) -> None:
    """Writes the model tensors of a checkpoint into the one safetensors file `target`.

    `checkpoint` is one, or a directory of them (then the newest whole one). One process, also where there are
    many; tensor by tensor, so that it holds at most the largest one twice. Names lose their prefix `model.`;
    a tied parameter stands once, and its aliases in the file's metadata (alias -> name). `target` appears
    when it is whole; a file of that name is replaced.

    With `shard_bytes`, `target` is a directory, and gets files of at most so many bytes (a larger tensor has
    one of its own) and, last, their index.

    Raises CheckpointError.
    """
    files, manifest = find(checkpoint)
    reader = alone(lambda: storage.opened(files, manifest), doing=f"reading {files}")
    if manifest.layout == "ranks":
        raise CheckpointError(
            f"{files} cannot be exported.",
            got='layout = "ranks"',
            why="its tensors are in parts, each a rank's own",
            fix='load it on its ranks and save it with checkpoint.layout = "sharded"',
        )

    model = _Model(
        str(files),
        manifest.model_tensors,
        _aliases(manifest.values),
        lambda name: storage.read_whole(name, reader),
    )
    alone(
        lambda: _write(model, Path(target), shard_bytes=shard_bytes, free_bytes=free_bytes),
        doing=f"exporting {files} to {target}",
    )


def full_state(state: Checkpointable) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the host) of everything that `state` saves, one after the other. Collective.

    Every rank must take them all. Each holds one whole tensor at a time, and no more.
    """
    for name, tensor in state.tensors().items():
        whole = tensor.detach()
        yield name, (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu().contiguous()


@dataclass(frozen=True)
class _Model:
    """Model tensors to be written, by their names in a checkpoint. `whole`: one of them, on the host."""

    what: str
    tensors: Mapping[str, SavedTensor]
    aliases: Mapping[str, str]
    whole: Callable[[str], Tensor]


def _write(
    model: _Model, target: Path, *, shard_bytes: int | None, free_bytes: Callable[[Path], int]
) -> None:
    tensors = _in_order(model)
    total_bytes = sum(one.size_bytes for one in tensors.values())
    if shard_bytes is None and target.is_dir():
        raise CheckpointError(
            f"{target} cannot be written.",
            got="a directory",
            fix=f"{target}/model.safetensors, or a size of files that go into it",
        )
    directory = target.parent if shard_bytes is None else target
    disk.make_directory(directory)
    disk.require_space(target, needed_bytes=total_bytes, available_bytes=free_bytes(directory))
    if shard_bytes is None:
        _write_file(model, target, tensors=tensors)
    else:
        _write_files(model, target, tensors=tensors, shard_bytes=shard_bytes)
    logger.info("exported %s to %s (%s)", model.what, target, format_bytes(total_bytes))


def _write_files(
    model: _Model, directory: Path, *, tensors: Mapping[str, SavedTensor], shard_bytes: int
) -> None:
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)  # of an earlier export: it must not name files of two
    parts = _parts(tensors, shard_bytes)
    names: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_file(model, directory / file, tensors=part)
        names |= {name.removeprefix(MODEL_PREFIX): file for name in part}
    total_bytes = sum(one.size_bytes for one in tensors.values())
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": names}, indent=1)
    with disk.replaced(index) as file:
        file.write(text.encode())


def _parts(tensors: Mapping[str, SavedTensor], shard_bytes: int) -> list[dict[str, SavedTensor]]:
    """In order, each of at most `shard_bytes`, or of one tensor."""
    parts: list[dict[str, SavedTensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if tensor.size_bytes > room or not parts:
            parts.append({})
            room = shard_bytes
        parts[-1][name] = tensor
        room -= tensor.size_bytes
    return parts


def _write_file(model: _Model, target: Path, *, tensors: Mapping[str, SavedTensor]) -> None:
    with disk.replaced(target) as file:
        file.write(_header(tensors, model.aliases))
        for name in tensors:
            file.write(model.whole(name).reshape(-1).view(torch.uint8).numpy().data)


def _in_order(model: _Model) -> dict[str, SavedTensor]:
    """Wide dtypes first, so that every tensor is aligned; then by name."""
    if not model.tensors:
        raise CheckpointError(f"{model.what} holds no model.")
    for name, tensor in model.tensors.items():
        if tensor.torch_dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} cannot be exported.", got=tensor.dtype, why="safetensors has no such dtype"
            )
    return dict(sorted(model.tensors.items(), key=lambda item: (-item[1].torch_dtype.itemsize, item[0])))


def _aliases(values: Mapping[str, JsonValue]) -> dict[str, str]:
    tied = values.get("tied") or {}
    if not isinstance(tied, dict):
        raise CheckpointError("the checkpoint's tied names cannot be read.", got=repr(tied))
    return {
        alias.removeprefix(MODEL_PREFIX): str(name).removeprefix(MODEL_PREFIX) for alias, name in tied.items()
    }


def _header(tensors: Mapping[str, SavedTensor], aliases: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.size_bytes
        header[name.removeprefix(MODEL_PREFIX)] = {
            "dtype": _DTYPES[tensor.torch_dtype],
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
