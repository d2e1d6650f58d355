"""Reads and writes the header of a safetensors file.

The format is: eight bytes (little-endian) with the length of a JSON header; the header (name -> dtype, shape,
and the byte range behind the header); the tensors' bytes, row-major and little-endian, without gaps.
https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.errors import DamagedCheckpointError
from fullshard.spec.small_files import parse_json

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_MOST_DIMS = 64  # limit of torch tensors
_LONGEST_BYTES = 100_000_000  # limit of the format's own reader


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file.

    file: name of the file
    begin: first byte, counted from the start of the file
    shape: shape of the tensor
    dtype: dtype of the tensor
    """

    file: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode(tensors: Mapping[str, SavedTensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the file up to the first tensor's bytes. The tensors follow in the given order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.size_bytes
        header[name] = {
            "dtype": DTYPES[tensor.torch_dtype],
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, FileTensor]:
    """Returns the tensors of a file, after checking that its header is consistent and matches the file size.

    Raises DamagedCheckpointError with the inconsistency; OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_LONGEST_BYTES, size - _LENGTH_BYTES):
            raise _damaged(path, f"{size} bytes, and a header of {length} that is not all there")
        text = file.read(length)
    try:
        header: Any = parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is no JSON object")
    named = cast(dict[str, Any], header)
    begin = _LENGTH_BYTES + length
    tensors = {
        name: _tensor(path, name, one=one, begin=begin)
        for name, one in named.items()
        if name != "__metadata__"
    }
    _check_places(path, tensors, size=size, begin=begin)
    return tensors


def _tensor(path: Path, name: str, *, one: Any, begin: int) -> FileTensor:
    stated: dict[str, Any] = one if isinstance(one, dict) else {}
    shape, offsets = _counts(stated.get("shape")), _counts(stated.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"{name}: {str(one)[:200]}")
    if not isinstance(stated.get("dtype"), str) or stated["dtype"] not in _BY_NAME:
        raise _damaged(path, f"{name}: dtype {stated.get('dtype')!r}, which this fullshard does not know")
    tensor = FileTensor(path.name, begin + offsets[0], tuple(shape), _BY_NAME[stated["dtype"]])
    if offsets[1] - offsets[0] != tensor.size_bytes:
        raise _damaged(
            path, f"{name}: {offsets[1] - offsets[0]} bytes for {stated['dtype']} {list(tensor.shape)}"
        )
    return tensor


def _counts(values: Any) -> list[int] | None:
    """Returns a list of non-negative integers; None for anything else."""
    if not isinstance(values, list):
        return None
    every = cast(list[Any], values)
    if len(every) > _MOST_DIMS:
        return None
    return every if all(type(value) is int and value >= 0 for value in every) else None


def _check_places(path: Path, tensors: Mapping[str, FileTensor], *, size: int, begin: int) -> None:
    placed = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].size_bytes))
    for (name, one), (after, other) in pairwise(placed):
        if one.begin + one.size_bytes > other.begin:
            raise _damaged(path, f"{name} and {after}, whose bytes overlap")
    end = max((one.begin + one.size_bytes for one in tensors.values()), default=begin)
    if end != size:
        kind = "cut off" if size < end else "longer than its tensors"
        raise _damaged(path, f"{size} bytes where its header says {end}: it is {kind}")


def _damaged(path: Path, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} is no whole safetensors file.", got=got, fix="fetch it again")
