"""A data file is pieces that torch reads, laid out so that large ones need no copy on their way."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.shard_file import (
    BLOCK_BYTES,
    BlockBuffer,
    ShardFileTable,
    ShardFileWriter,
    read_verified_part_into,
)
from fullshard.checkpoint.storage import write_shards
from fullshard.system.direct_io import ALIGNMENT, LARGE_BYTES, allocate_aligned_memory
from tests.checkpoint.states import mixed


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def page_aligned(tensor: Tensor) -> Tensor:
    if not tensor.nbytes:
        return tensor.clone()
    copy = torch.frombuffer(allocate_aligned_memory(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def written(tensors: dict[str, Tensor], file: Any = None) -> tuple[bytes, ShardFileTable]:
    file = file or io.BytesIO()
    with ShardFileWriter(file) as pieces:
        for name, tensor in tensors.items():
            pieces.write_tensor(name, tensor, index=(0,) * tensor.ndim)
    return file.getvalue(), pieces.table


def test_a_large_tensors_elements_begin_a_page_and_others_take_no_padding():
    tensors = {name: tensor.contiguous() for name, tensor in mixed().items()}
    data, table = written(tensors)
    end = 0
    for piece in table.pieces:
        padding, begin = piece.offset - end, piece.offset + piece.data_offset
        if tensors[piece.name].nbytes >= LARGE_BYTES:
            assert begin % ALIGNMENT == 0, piece.name
            assert padding < ALIGNMENT
            assert not any(data[end : piece.offset])
        else:
            assert padding == 0, piece.name
        assert data[begin : begin + tensors[piece.name].nbytes] == bytes_of(tensors[piece.name])
        end = piece.offset + piece.length
    assert end == len(data) == table.pieces_bytes


def amid_storage(tensor: Tensor) -> Tensor:
    """With other elements before and behind it in its storage, as an engine's padding."""
    around = torch.empty(tensor.numel() + 7, dtype=tensor.dtype)
    return around[3 : 3 + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("move", [torch.clone, page_aligned, amid_storage])
def test_where_a_tensor_lies_in_memory_does_not_change_the_file(tmp_path, move):
    """Copied or not: through a stream onto the disk, and into anything else that takes bytes."""
    torch.serialization.set_crc32_options(False)  # as `write_shards` has it
    try:
        data, expected = written(mixed())
    finally:
        torch.serialization.set_crc32_options(True)
    shards = [(name, (0,) * tensor.ndim, move(tensor)) for name, tensor in mixed().items()]
    _, entry = write_shards(LocalFiles(tmp_path), "data", shards=shards, check=lambda _, one: None)
    whole = (tmp_path / "data").read_bytes()
    assert entry is not None
    assert (entry.size_bytes, entry.digest_begin) == (len(whole), len(data))
    assert whole[: len(data)] == data
    assert ShardFileTable.model_validate_json(whole[len(data) :]) == expected


class _CountingFile(io.BytesIO):
    taken = 0

    def readinto(self, buffer: Any, /) -> int:
        got = super().readinto(buffer)
        self.taken += got
        return got


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_parts_of_a_shard_that_are_read_in_order_take_each_byte_once(rows):
    tensor = torch.arange(100 * (BLOCK_BYTES // 250)).view(100, -1)
    data, table = written({"stack": tensor})
    (piece,) = table.pieces
    file, buffer, found = _CountingFile(data), BlockBuffer(BLOCK_BYTES), torch.empty_like(tensor)
    for begin in range(0, 100, rows):
        target = found[begin : begin + rows]
        read_verified_part_into(file, piece, offsets=(begin, 0), target=target, buffer=buffer)
    assert torch.equal(found, tensor)
    assert piece.length > 3 * BLOCK_BYTES
    assert file.taken == piece.length
