"""One safetensors file of a checkpoint's model, which other programs read.

The format: eight bytes (little-endian) with the length of a JSON header; the header (name -> dtype, shape,
and the range of its bytes behind the header); the tensors' bytes, row-major and little-endian, without gaps.
https://github.com/huggingface/safetensors#format
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import JsonValue

from fullshard.checkpoint import disk, storage
from fullshard.checkpoint.agreement import alone
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.load import find
from fullshard.checkpoint.manifest import MODEL_PREFIX, Manifest, SavedTensor
from fullshard.checkpoint.place import Place
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
    checkpoint_directory: str | Path | Place,
    target: str | Path,
    *,
    free_bytes: Callable[[Path], int] = disk.free_bytes,
) -> None:
    """Writes the model tensors of a checkpoint into the one safetensors file `target`.

    `checkpoint_directory` is a checkpoint, or a directory of them (then the newest whole one). One process,
    also where there are many; tensor by tensor, so that it holds at most the largest one twice. Names lose
    their prefix `model.`; a tied parameter stands once, and its aliases in the file's metadata (alias ->
    name). `target` appears when it is whole; a file of that name is replaced.

    Raises CheckpointError.
    """
    target = Path(target)
    files, manifest = find(checkpoint_directory)
    tensors = _model_tensors(files, manifest)
    header = _header(tensors, _aliases(manifest.values))
    needed_bytes = len(header) + sum(one.size_bytes for one in tensors.values())
    if target.is_dir():
        raise CheckpointError(
            f"{target} cannot be written.", got="a directory", fix=f"{target}/model.safetensors"
        )

    def write() -> None:
        disk.make_directory(target.parent)
        disk.require_space(target, needed_bytes=needed_bytes, available_bytes=free_bytes(target.parent))
        with disk.replaced(target) as file:
            file.write(header)
            _write_tensors(file, storage.opened(files, manifest), tensors=tensors)

    alone(write, doing=f"exporting {files} to {target}")
    logger.info("exported %s to %s (%s)", files, target, format_bytes(needed_bytes))


def _model_tensors(files: Files, manifest: Manifest) -> dict[str, SavedTensor]:
    """Wide dtypes first, so that every tensor is aligned; then by name."""
    tensors = manifest.model_tensors
    if not tensors:
        raise CheckpointError(
            f"{files} holds no model.", got=", ".join(list(manifest.tensors)[:3]) or "no tensor at all"
        )
    for name, tensor in tensors.items():
        if tensor.torch_dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} cannot be exported.", got=tensor.dtype, why="safetensors has no such dtype"
            )
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].torch_dtype.itemsize, item[0])))


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


def _write_tensors(file: BinaryIO, reader: storage.Reader, *, tensors: Mapping[str, SavedTensor]) -> None:
    for name, saved in tensors.items():
        tensor = torch.empty(saved.shape, dtype=saved.torch_dtype)
        storage.read({name: tensor}, reader, alone=True)
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
