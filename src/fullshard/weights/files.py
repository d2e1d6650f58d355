"""Safetensors files: the header of a file, the files of a Hugging Face model, and copies out of them.

The format is: eight bytes (little-endian) with the length of a JSON header; the header (name -> dtype, shape,
and the byte range behind the header); the tensors' bytes, row-major and little-endian, without gaps.
https://github.com/huggingface/safetensors#format
"""

import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, cycle, groupby
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.host import make_device_thread
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.weight_map import BoxCopy, row_major_strides
from fullshard.system.small_files import VALUE_BYTES, ForeignErrorTranslator, parse_json, read_bytes

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 64 << 20
_ALIGNMENT = 8
_COMPARED_BYTES = 8 << 20  # of each of two tensors at a time
_BUFFER_BYTES = 8 << 20
_LENGTH_BYTES = 8
_MOST_DIMS = 64  # limit of torch tensors

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
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
# Gaps of up to this size are read and dropped, which takes less time than another read.
GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A copy of strided elements of `source` into `target`.

    source: name of the source tensor
    begin: index of the first element in the flat source
    strides: source elements from one index to the next, for each dim of `target`
    target: view into the tensor that is filled
    """

    source: str
    begin: int
    strides: tuple[int, ...]
    target: Tensor

    @property
    def span_length(self) -> int:
        """Number of source elements from the first to the last copied one, with the gaps between."""
        return 1 + sum((n - 1) * s for n, s in zip(self.target.shape, self.strides, strict=True))

    @property
    def is_contiguous_on_both_sides(self) -> bool:
        """True if the elements are adjacent in both source and target, in the same order."""
        wanted = row_major_strides(tuple(self.target.shape))
        dims = zip(self.target.shape, self.strides, wanted, strict=True)
        agree = all(size == 1 or stride == step for size, stride, step in dims)
        return agree and self.target.is_contiguous()

    def narrow(self, dim: int, begin: int, *, length: int) -> "StridedCopy":
        """Returns the copy restricted to `length` elements from `begin` along `dim`."""
        start = self.begin + begin * self.strides[dim]
        return StridedCopy(self.source, start, self.strides, self.target.narrow(dim, begin, length))

    def fill_target(self, elements: Tensor) -> None:
        """Fills `target` from `elements`, the `span_length` elements from `begin` on. Converts the dtype."""
        self.target.copy_(elements.as_strided(self.target.shape, self.strides, elements.storage_offset()))


def iterate_copies(
    target: Tensor, parts: Sequence[BoxCopy], *, offsets: Sequence[int]
) -> Iterator[StridedCopy]:
    """Yields the copies from `parts` of a tensor that fill `target`, which begins at `offsets` in it."""
    for part in parts:
        begin, view = part.begin, target
        for dim, offset in enumerate(offsets):
            low = max(part.at[dim], offset)
            high = min(part.at[dim] + part.shape[dim], offset + target.shape[dim])
            if low >= high:
                break
            begin += (low - part.at[dim]) * part.strides[dim]
            view = view.narrow(dim, low - offset, high - low)
        else:
            if target.numel():
                yield StridedCopy(part.source, begin, part.strides, view)


def split_copy(move: StridedCopy, *, most: int, itemsize: int) -> Iterator[StridedCopy]:
    """Splits `move` into copies that each span at most `most` source elements and no gap above GAP_BYTES.

    itemsize: bytes per source element
    """
    dims = [dim for dim, size in enumerate(move.target.shape) if size > 1]
    if not dims:
        yield move
        return
    outer = max(dims, key=lambda dim: move.strides[dim])
    stride, size = move.strides[outer], move.target.shape[outer]
    inner = move.span_length - (size - 1) * stride
    far_apart = (stride - inner) * itemsize > GAP_BYTES
    if move.span_length <= most and not far_apart:
        yield move
        return
    fitting = 1 if far_apart or inner >= most else max(1, (most - inner) // max(stride, 1) + 1)
    for begin in range(0, size, fitting):
        piece = move.narrow(outer, begin, length=min(fitting, size - begin))
        yield from split_copy(piece, most=most, itemsize=itemsize)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Position, shape and dtype of a tensor in a file.

    file: name of the file
    begin: first byte, counted from the start of the file
    """

    file: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def encode_header(tensors: Mapping[str, SavedTensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of a safetensors file before its first tensor, for `tensors` in the given order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.size_bytes
        dtype = DTYPES[tensor.torch_dtype]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, FileTensor]:
    """Reads the header of a safetensors file, after safetensors has checked the header and the file's size.

    Raises DamagedCheckpointError with the inconsistency; OSError.
    """

    def damaged_file_error(got: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{path} is not a complete safetensors file.", got=got, fix="get it again"
        )

    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > VALUE_BYTES:
            raise damaged_file_error(f"a header of {length:,} bytes, at most {VALUE_BYTES:,}")
        with ForeignErrorTranslator(damaged_file_error), safe_open(path, framework="numpy"):
            pass  # only opened for its checks
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors: dict[str, FileTensor] = {}
    for name, stated in header.items():
        dtype, shape = stated["dtype"], tuple(stated["shape"])
        if dtype not in _BY_NAME or len(shape) > _MOST_DIMS:
            raise damaged_file_error(f"{name}: {dtype} of {len(shape)} dims, which torch does not have")
        begin = _LENGTH_BYTES + length + stated["data_offsets"][0]
        tensors[name] = FileTensor(path.name, begin, shape, _BY_NAME[dtype])
    return tensors


@dataclass(frozen=True)
class ComputedTensor(ABC):
    """A tensor whose elements are computed from others in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read_rows(self, directory: Path, rows: range) -> tuple[Tensor, int]:
        """Returns rows of the tensor, flattened to a matrix of its last dim, and the number of bytes read."""


@dataclass(frozen=True)
class PretrainedFiles:
    """Safetensors files of one model in `directory`: the position of each tensor, by name."""

    directory: Path
    tensors: Mapping[str, FileTensor | ComputedTensor]

    def have_equal_bytes(self, name: str, other: str) -> bool:
        """Returns True if two stored tensors have equal bytes, dtype and shape. Raises OSError."""
        both = [self.tensors[name], self.tensors[other]]
        pair = [one for one in both if isinstance(one, FileTensor)]
        if len(pair) < 2 or len({(one.shape, one.dtype) for one in pair}) > 1:
            return False
        left = math.prod(pair[0].shape) * pair[0].dtype.itemsize
        with ExitStack() as stack:
            opened = [stack.enter_context((self.directory / one.file).open("rb")) for one in pair]
            for file, one in zip(opened, pair, strict=True):
                file.seek(one.begin)
            while left > 0:
                first, second = (file.read(min(left, _COMPARED_BYTES)) for file in opened)
                if first != second or not first:
                    return False
                left -= len(first)
        return True


def copy_from_files(moves: Iterable[StridedCopy], files: PretrainedFiles) -> int:
    """Fills the targets of `moves` from `files`. Returns the number of bytes read.

    Uses two buffers of 8 MiB. Raises DamagedCheckpointError for a file that ends early; OSError.
    """
    moves, read_bytes = list(moves), 0
    pieces = chain(_read_pieces(moves, files), _compute_pieces(moves, files))
    # The next piece is read on the thread while this one is converted.
    with torch.no_grad(), make_device_thread("read") as thread:
        coming = thread.submit(next, pieces, None)
        while (found := coming.result()) is not None:
            coming = thread.submit(next, pieces, None)
            piece, elements, piece_bytes = found
            piece.fill_target(elements)
            read_bytes += piece_bytes
    return read_bytes


_Piece = tuple[StridedCopy, Tensor, int]  # a copy, its elements, and the number of bytes read for them


def _compute_pieces(moves: Sequence[StridedCopy], files: PretrainedFiles) -> Iterator[_Piece]:
    for move in moves:
        tensor = files.tensors[move.source]
        if isinstance(tensor, ComputedTensor):
            columns, itemsize = tensor.shape[-1], tensor.dtype.itemsize
            for piece in split_copy(move, most=_BUFFER_BYTES // itemsize, itemsize=itemsize):
                rows = range(piece.begin // columns, -(-(piece.begin + piece.span_length) // columns))
                values, read_bytes = tensor.read_rows(files.directory, rows)
                yield piece, values.view(-1)[piece.begin - rows.start * columns :], read_bytes


def _read_pieces(moves: Sequence[StridedCopy], files: PretrainedFiles) -> Iterator[_Piece]:
    """Yields pieces of the `moves` of stored sources, with their elements, in the order of the bytes.

    The elements are valid until the piece after the next one is read.
    """
    sources = {name: one for name, one in files.tensors.items() if isinstance(one, FileTensor)}

    def place(move: StridedCopy) -> tuple[str, int]:
        tensor = sources[move.source]
        return tensor.file, tensor.begin + move.begin * tensor.dtype.itemsize

    pinned = any(move.target.is_cuda for move in moves)
    buffers = cycle([torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)])
    in_order = sorted((move for move in moves if move.source in sources), key=place)
    for file, inside in groupby(in_order, key=lambda move: sources[move.source].file):
        path = files.directory / file
        with path.open("rb") as opened:
            for move in inside:
                dtype = sources[move.source].dtype
                most = _BUFFER_BYTES // dtype.itemsize
                for piece in split_copy(move, most=most, itemsize=dtype.itemsize):
                    elements = next(buffers)[: piece.span_length * dtype.itemsize]
                    _read_fully(opened, path, begin=place(piece)[1], into=elements)
                    yield piece, elements.view(dtype), elements.nbytes


def read_range(directory: Path, tensor: FileTensor, *, dim: int, begin: int, end: int) -> Tensor:
    """Reads indices `begin` to `end` along `dim` of a tensor, and nothing else.

    Raises DamagedCheckpointError for a file that ends early; OSError.
    """
    size, row_bytes = tensor.shape[dim], math.prod(tensor.shape[dim + 1 :]) * tensor.dtype.itemsize
    shape = (*tensor.shape[:dim], end - begin, *tensor.shape[dim + 1 :])
    found, path = torch.empty(shape, dtype=tensor.dtype), directory / tensor.file
    run_bytes = found.nbytes if end - begin == size else (end - begin) * row_bytes
    with path.open("rb") as opened:
        for index, run in enumerate(found.view(torch.uint8).view(-1).split(max(run_bytes, 1))):
            place = tensor.begin + index * size * row_bytes + begin * row_bytes
            _read_fully(opened, path, begin=place, into=run)
    return found


def _read_fully(opened: io.BufferedReader, path: Path, *, begin: int, into: Tensor) -> None:
    opened.seek(begin)
    # Python's buffer is passed by: bytes that it would not hold go straight into the target.
    if opened.readinto(cast(bytearray, into.numpy())) < into.nbytes:
        raise DamagedCheckpointError(
            f"{path} ends early.",
            got=f"{opened.tell()} bytes",
            why="it was whole when its header was read: something else writes it",
        )


def find_weights_file(directory: Path) -> Path | None:
    """Returns the weights file of a directory: model.safetensors, or the index of several files.

    A path of a safetensors file is returned itself. None if there are no weights.
    """
    if directory.is_file():
        return directory if directory.suffix == ".safetensors" else None
    return next((directory / name for name in (ONE_FILE, INDEX) if (directory / name).is_file()), None)


def open_pretrained_files(path: Path) -> PretrainedFiles:
    """Opens the weights of a Hugging Face directory or of one safetensors file. Reads only the headers.

    Raises CheckpointError if there are no weights, DamagedCheckpointError for incomplete files; OSError.
    """
    found = find_weights_file(path)
    if found is None:
        raise missing_weights_error(path)
    tensors = _read_indexed_headers(found) if found.name == INDEX else read_header(found)
    return PretrainedFiles(found.parent, tensors)


def _read_indexed_headers(index: Path) -> dict[str, FileTensor]:
    try:
        data: Any = parse_json(read_bytes(index, most_bytes=_INDEX_BYTES))
    except ValueError as error:
        raise DamagedCheckpointError(f"{index} is not JSON.", got=str(error)) from error
    weight_map: Any = cast(dict[str, Any], data).get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise DamagedCheckpointError(f"{index} names no files.", got="no weight_map in it")
    names = cast(dict[str, Any], weight_map)
    inside: dict[str, dict[str, FileTensor]] = {}
    for file in sorted({str(file) for file in names.values()}):
        path = index.parent / file
        if Path(file).name != file or not os.path.isfile(path):
            raise CheckpointError(
                f"{path} is not there.", got=f"{INDEX} names it", fix="fetch it, or the right index"
            )
        inside[file] = read_header(path)
    for name, file in names.items():
        if name not in inside[str(file)]:
            raise DamagedCheckpointError(
                f"{index} does not belong to its files.",
                got=f"{name} is not in {file}",
                fix="fetch both again",
            )
    return {name: inside[str(file)][name] for name, file in names.items()}


def missing_weights_error(path: Path) -> CheckpointError:
    """Returns the error for `path`, in which there are no weights of a whole model."""
    if not path.exists():
        return CheckpointError(f"{path} is not there.", fix="a directory with model.safetensors")
    if adapters := sorted(one.name for one in path.glob("adapter_*")):
        return CheckpointError(
            f"{path} holds adapters without the model that they adapt.",
            got=", ".join(adapters),
            fix="the base model's directory, or the whole model that peft's merge_and_unload() makes",
        )
    several = sorted(one.name for one in path.glob("*.safetensors")) if path.is_dir() else []
    if several:
        return CheckpointError(
            f"{path} holds files without their index.",
            got=", ".join(several[:3]) + (", ..." if len(several) > 3 else ""),
            why=f"{INDEX} says which of them belong to the model",
            fix=f"fetch {INDEX} too, or give the one file",
        )
    other = sorted(one.name for one in path.glob("*.bin")) if path.is_dir() else []
    return CheckpointError(
        f"{path} holds no weights in safetensors.",
        got=", ".join(other[:3]) or "no *.safetensors",
        why="a .bin is a pickle, which can run code" if other else None,
        fix="transformers' save_pretrained writes safetensors" if other else None,
    )
