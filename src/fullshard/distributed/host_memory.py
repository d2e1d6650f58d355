"""Buffers in memory that the ranks of one host share, and all-reduces within them (Linux).

gloo sends through sockets even within a host, which takes processor time from the ranks.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

_TOKEN_BYTES = 8


class HostBuffers:
    """A buffer of each rank of a process group on one host, in memory that all of its ranks map.

    The memory is freed when the last process that maps it ends, even if it is killed.

    own: this rank's buffer
    """

    def __init__(self, buffers: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
        self._buffers, self._rank = buffers, dist.get_rank(group)
        self.own = buffers[self._rank]

    @classmethod
    def allocate(cls, numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> Self | None:
        """Returns buffers of `numel` elements; None if the ranks of `group` cannot share memory.

        Collective over `group`.
        """
        token = secrets.randbits(62)
        nbytes = max(numel * dtype.itemsize, _TOKEN_BYTES)
        file = _create_file(nbytes, token)
        names = torch.empty(dist.get_world_size(group), 3, dtype=torch.int64)
        own = torch.tensor([os.getpid(), -1 if file is None else file, token])
        dist.all_gather(list(names.unbind()), own, group=group)
        maps = [
            _map_file(f"/proc/{process}/fd/{number}", token=begin, nbytes=nbytes)
            for process, number, begin in names.tolist()
        ]
        are_mapped = torch.tensor([None not in maps], dtype=torch.int32)
        # No rank closes its file before all have mapped it.
        dist.all_reduce(are_mapped, op=dist.ReduceOp.MIN, group=group)
        if file is not None:
            os.close(file)
        if are_mapped.tolist() == [0]:
            return None
        buffers = [torch.frombuffer(one, dtype=dtype, count=numel) for one in maps if one is not None]
        return cls(buffers, group=group)

    def sum_own_part(self) -> None:
        """Adds the other ranks' part number `rank` to the same part of this rank's buffer."""
        ranks = len(self._buffers)
        parts = [buffer.tensor_split(ranks)[self._rank] for buffer in self._buffers]
        for step in range(1, ranks):
            parts[self._rank].add_(parts[(self._rank - step) % ranks])

    def copy_other_parts(self) -> None:
        """Copies the parts that the other ranks have summed."""
        ranks = len(self._buffers)
        for rank, part in enumerate(self.own.tensor_split(ranks)):
            if rank != self._rank:
                part.copy_(self._buffers[rank].tensor_split(ranks)[rank])


def all_reduce_on_host(buffers: Sequence[HostBuffers], *, group: dist.ProcessGroup) -> None:
    """Sums each of `buffers` over the ranks of `group`, in place.

    Call it after a collective for which all ranks have filled their buffers.
    """
    for one in buffers:
        one.sum_own_part()
    dist.barrier(group)
    for one in buffers:
        one.copy_other_parts()
    dist.barrier(group)  # before a rank fills its buffer again


def _create_file(nbytes: int, token: int) -> int | None:
    """Returns a file in memory that begins with `token`; None if none can be made."""
    try:
        file = os.memfd_create("fullshard")
    except (AttributeError, OSError):  # not on Linux, or too many open files
        return None
    os.truncate(file, nbytes)
    os.pwrite(file, token.to_bytes(_TOKEN_BYTES), 0)
    return file


def _map_file(path: str, *, token: int, nbytes: int) -> mmap.mmap | None:
    """Maps the file if it begins with `token`; None if it is that of another process with the same id."""
    try:
        with open(path, "r+b", buffering=0) as file:
            begin = os.pread(file.fileno(), _TOKEN_BYTES, 0)
            return mmap.mmap(file.fileno(), nbytes) if begin == token.to_bytes(_TOKEN_BYTES) else None
    except OSError:
        return None
