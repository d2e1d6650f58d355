"""Data files of shards, with digests that detect and locate flipped bits.

    __0_0.distcp    piece | piece | … | table

A piece is one shard of a tensor, as `torch.save` writes it. The table (JSON) says which piece lies where, and
has a digest of every block of it. In formats 2 and 3 it is a file of its own, `__0_0.distcp.pieces`.

The elements of a large shard begin at a page of the file (4096 bytes), so that they can be written without a
copy from a buffer that does, too; zeros precede their piece. See [Note: past the page cache].

Digests are XXH3 of 128 bits (https://xxhash.com), which detect accidental damage, not tampering. They are
computed of the bytes in memory, before they are written. Blocks are counted from the start of each piece, so
that a part of a large piece can be verified without reading all of it.
"""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, BinaryIO, Self, TypeVar, cast

import torch
import xxhash
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from fullshard.errors import DamagedCheckpointError
from fullshard.spec.value import FrozenModel, NonNegativeInt, PositiveInt
from fullshard.system.direct_io import ALIGNMENT, LARGE_BYTES, memory_address

M = TypeVar("M", bound=FrozenModel)

BLOCK_BYTES = 16 << 20
SUFFIX = ".pieces"
_XXH3_DIGITS = 32
Dims = Annotated[tuple[NonNegativeInt, ...], Field(max_length=64)]  # torch has no tensor of more dims


def new_hash_of_same_kind(digest: str, data: bytes | memoryview) -> hashlib.blake2b | xxhash.xxh3_128:
    """Returns a hash object of `data` of the kind of `digest`: XXH3, or BLAKE2b of an earlier version."""
    return xxhash.xxh3_128(data) if len(digest) == _XXH3_DIGITS else hashlib.blake2b(data, digest_size=32)


def parse_checkpoint_json(kind: type[M], data: bytes, *, source: str) -> M:
    """Parses JSON as a model of `kind`. Raises DamagedCheckpointError, which names `source`, on failure."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise DamagedCheckpointError(f"{source} is damaged.", got=error.errors()[0]["msg"]) from error


class ShardRecord(FrozenModel):
    """One shard of a tensor, and its piece of a data file.

    name: name of the tensor
    index: position of the shard's first element in the whole tensor, per dim
    shape: shape of the shard
    dtype: name as torch spells it
    offset: byte of the file at which the piece begins
    length: bytes of the piece
    data_offset: byte of the piece at which its row-major elements begin, after the header of `torch.save`
    digests: digest of each block of the piece
    """

    name: str
    index: Dims
    shape: Dims
    dtype: str
    offset: NonNegativeInt
    length: PositiveInt
    data_offset: NonNegativeInt
    digests: tuple[str, ...]


class ShardFileTable(FrozenModel):
    """All pieces of one data file, in the order of the file. The bytes between pieces are zeros."""

    block_bytes: Annotated[int, Field(gt=0, le=4 * BLOCK_BYTES)]
    pieces: tuple[ShardRecord, ...]

    @model_validator(mode="after")
    def _check_piece_positions(self) -> Self:
        end = 0
        for piece in self.pieces:
            elements = math.prod(piece.shape) * _dtype_item_bytes(piece.dtype)
            if not end <= piece.offset < end + ALIGNMENT or piece.data_offset + elements > piece.length:
                raise ValueError(f"the piece of {piece.name} is not where it can be")
            if len(piece.index) != len(piece.shape):
                raise ValueError(f"the piece of {piece.name} begins at {list(piece.index)} of its tensor")
            end = piece.offset + piece.length
        return self

    @property
    def pieces_bytes(self) -> int:
        """Bytes of the pieces and of the zeros between them, after which the table begins."""
        return self.pieces[-1].offset + self.pieces[-1].length if self.pieces else 0


def _dtype_item_bytes(dtype: str) -> int:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        raise ValueError(f"the installed torch has no dtype {dtype!r}")
    return known.itemsize


class ShardFileWriter:
    """Writes tensors to a data file, and records their positions and digests."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = self._start = self._data_offset = 0
        self._pieces: list[ShardRecord] = []
        self._blocks = _BlockDigester()
        self._elements: tuple[int, int] = (0, 0)  # address and bytes of the tensor being written
        self._around = bytearray()  # bytes that torch.save puts before or after them
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def write_tensor(self, name: str, tensor: Tensor, *, index: Sequence[int]) -> ShardRecord:
        """Writes a CPU shard, whose position in its tensor is `index`, as `torch.save` does."""
        tensor = _without_unused_storage(tensor)
        self._start, self._data_offset, self._blocks = self._position, 0, _BlockDigester()
        self._elements = (tensor.data_ptr(), tensor.nbytes)
        try:
            torch.save(tensor, cast(BinaryIO, self))
        except RuntimeError as error:  # about positions in the file, if a write has failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        self._write_torch_save_overhead()
        assert self._data_offset or not tensor.nbytes, "torch.save writes a tensor's elements in one call"
        piece = ShardRecord(
            name=name,
            index=tuple(index),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=self._start,
            length=self._position - self._start,
            data_offset=self._data_offset,
            digests=self._blocks.hexdigests(),
        )
        self._pieces.append(piece)
        return piece

    def write(self, data: memoryview) -> int:
        """Takes bytes from `torch.save`, which passes a tensor's elements in one call, without a copy."""
        where, length = self._elements
        if data.nbytes == length > 0 and memory_address(data) == where:
            self._data_offset = len(self._around)
            if data.nbytes >= LARGE_BYTES:  # zeros, so that the elements begin at a page of the file
                padding = -(self._position + self._data_offset) % ALIGNMENT
                self._file.write(bytes(padding))
                self._position += padding
                self._start = self._position
            self._write_torch_save_overhead()
            self._write_and_digest(data.cast("B"))
        else:
            self._around += data
        return data.nbytes

    def _write_torch_save_overhead(self) -> None:
        self._write_and_digest(memoryview(self._around))
        self._around = bytearray()

    def _write_and_digest(self, data: memoryview) -> None:
        parts = [data[begin : begin + BLOCK_BYTES] for begin in range(0, data.nbytes, BLOCK_BYTES)]
        straight = data.nbytes >= LARGE_BYTES and memory_address(data) % ALIGNMENT == 0
        digested = self._thread.submit(self._blocks.update_digests, data) if straight else None
        for part in parts:
            if digested is None:  # it will be copied next, while it is still in the processor's cache
                self._blocks.update_digests(part)
            self._file.write(part)
        if digested is not None:
            digested.result()
        self._position += data.nbytes

    def flush(self) -> None:
        """Does nothing. `torch.save` calls it; the file is flushed when it is closed."""

    @property
    def table(self) -> ShardFileTable:
        return ShardFileTable(block_bytes=BLOCK_BYTES, pieces=tuple(self._pieces))


def _without_unused_storage(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same elements whose storage has no others, if possible without a copy."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.is_contiguous() and tensor.nbytes >= LARGE_BYTES:
        data = cast(bytearray, tensor.reshape(-1).view(torch.uint8).numpy())
        return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)
    return tensor.clone(memory_format=torch.contiguous_format)


class _BlockDigester:
    """Digests of a stream of bytes, one per BLOCK_BYTES."""

    def __init__(self) -> None:
        self._hashes = list[xxhash.xxh3_128]()
        self._room = 0  # bytes that the last block lacks

    def update_digests(self, data: memoryview) -> None:
        while data.nbytes:
            if not self._room:
                self._hashes.append(xxhash.xxh3_128())
                self._room = BLOCK_BYTES
            part, data = data[: self._room], data[self._room :]
            self._hashes[-1].update(part)
            self._room -= part.nbytes

    def hexdigests(self) -> tuple[str, ...]:
        return tuple(one.hexdigest() for one in self._hashes)


class BlockBuffer:
    """Memory for the block that was read last. Parts of it that are wanted next are not read again.

    size_bytes: size of a block; 0 before the first table is read
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self.memory = memoryview(bytearray(size_bytes))
        self._block_in_memory: tuple[Sequence[str], int] | None = None  # its digest and length

    def read_verified_block(self, file: BinaryIO, piece: ShardRecord, *, number: int) -> memoryview:
        """Returns block `number` of `piece`, valid until the next call. Raises as `verify_piece`."""
        begin = number * self.memory.nbytes
        block = self.memory[: piece.length - begin]
        wanted = (piece.digests[number : number + 1], block.nbytes)
        if self._block_in_memory != wanted:
            self._block_in_memory = None  # until the bytes are verified
            file.seek(piece.offset + begin)
            _read_verified_block_into(file, piece, number=number, target=block)
            self._block_in_memory = wanted
        return block


def verify_piece(file: BinaryIO, piece: ShardRecord, *, begin: int, scratch: memoryview) -> None:
    """Reads and verifies the zeros from `begin` to `piece`, and all its blocks. `scratch` has a block's size.

    Raises DamagedCheckpointError for other bytes than zeros, and for the first block whose digest differs, or
    that is cut off.
    """
    padding = bytearray(piece.offset - begin)
    file.seek(begin)
    if _read_until_full_or_end(file, memoryview(padding)) < len(padding) or any(padding):
        found = f"bytes {begin} to {piece.offset}, before {piece.name}, are not all zero"
        raise _altered_bytes_error(file, got=found)
    for number, start in enumerate(range(0, piece.length, scratch.nbytes)):
        _read_verified_block_into(file, piece, number=number, target=scratch[: piece.length - start])


def read_verified_part_into(
    file: BinaryIO, piece: ShardRecord, *, offsets: Sequence[int], target: Tensor, buffer: BlockBuffer
) -> None:
    """Fills `target` with the part of a shard that begins at `offsets` (per dim) and has its shape.

    Reads and verifies only the blocks with the rows (dim 0) of this part. Raises as `verify_piece` does; the
    content of the target is then undefined.
    """
    if target.numel() == 0:
        return
    block_bytes = buffer.memory.nbytes
    row_bytes = math.prod(piece.shape[1:]) * target.dtype.itemsize
    row, rows = (offsets[0], target.shape[0]) if piece.shape else (0, 1)
    begin = piece.data_offset + row * row_bytes
    whole_rows = tuple(target.shape[1:]) == piece.shape[1:]
    in_place = whole_rows and target.device.type == "cpu" and target.is_contiguous()
    shape = (rows, *piece.shape[1:]) if piece.shape else ()
    elements = target if in_place else torch.empty(shape, dtype=target.dtype)
    data = memoryview(cast(bytearray, elements.reshape(-1).view(torch.uint8).numpy()))
    stop = begin + rows * row_bytes
    for number in range(begin // block_bytes, (stop - 1) // block_bytes + 1):
        low, high = number * block_bytes, min((number + 1) * block_bytes, piece.length)
        first, last = max(low, begin), min(high, stop)
        wanted = data[first - begin : last - begin]
        if (first, last) == (low, high):
            file.seek(piece.offset + low)
            _read_verified_block_into(file, piece, number=number, target=wanted)
        else:  # its other bytes are read for its digest, and may be wanted next
            wanted[:] = buffer.read_verified_block(file, piece, number=number)[first - low : last - low]
    if not in_place:
        for dim in range(1, len(piece.shape)):
            elements = elements.narrow(dim, offsets[dim], target.shape[dim])
        target.copy_(elements)


def _read_verified_block_into(file: BinaryIO, piece: ShardRecord, *, number: int, target: memoryview) -> None:
    """Reads block `number` of `piece` from the file's position into `target`, and checks its digest."""
    expected = piece.digests[number] if number < len(piece.digests) else ""
    if _read_until_full_or_end(file, target) < target.nbytes:
        raise DamagedCheckpointError(f"{_file_label(file)} ends early.", got=f"its end in {piece.name}")
    if new_hash_of_same_kind(expected, target).hexdigest() != expected:
        end = file.tell()
        altered = f"a part of {piece.name}, bytes {end - target.nbytes} to {end}, whose digest is another"
        raise _altered_bytes_error(file, got=altered)


def _altered_bytes_error(file: BinaryIO, *, got: str) -> DamagedCheckpointError:
    why = "the disk, or something on the way to it, changed them"
    return DamagedCheckpointError(f"{_file_label(file)} holds other bytes than were saved.", got=got, why=why)


def _read_until_full_or_end(file: BinaryIO, target: memoryview) -> int:
    done, read_into = 0, file.readinto  # pyright: ignore[reportAttributeAccessIssue]
    while done < target.nbytes and (count := read_into(target[done:])):
        done += count
    return done


def _file_label(file: BinaryIO) -> str:
    return str(getattr(file, "name", "a file"))
