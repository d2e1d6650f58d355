"""Collectives of the hosts in ⌈log₂ ranks⌉ rounds of messages, for groups that have gloo.

[Note: rounds] In each round a rank sends what it knows to one rank, and receives as much from another, twice
as far away as in the round before (Bruck et al., doi:10.1109/71.642949). gloo's own all-gather and all-reduce
pass messages around a ring, ranks - 1 of them one after another. In a group that connects on demand, a rank
then connects to at most 2 ⌈log₂ ranks⌉ others. All ranks send equally many messages: gloo counts them, and
ranks compare their counts (`count_issued_collectives`).
"""

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed.collectives import ROUND

T = TypeVar("T")


def all_gather_pickled(value: T, *, group: dist.ProcessGroup | None) -> list[T]:
    """Returns a list of every rank's `value`, in rank order. Collective over `group` (None: all ranks)."""
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    known = [pickle.dumps(value)]  # of the ranks `place`, `place` + 1, …
    for distance in _distances(ranks):
        sent = known[: ranks - distance]
        sizes = torch.tensor([len(one) for one in sent], device="cpu")
        sizes = _swap(sizes, torch.empty_like(sizes), distance=distance, group=group).tolist()
        content = torch.frombuffer(bytearray().join(sent), dtype=torch.uint8)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = _swap(content, received, distance=distance, group=group).split(sizes)
        known += [part.numpy().tobytes() for part in parts]
    return [pickle.loads(one) for one in known[ranks - place :] + known[: ranks - place]]


def all_reduce_largest(own: Sequence[float], *, group: dist.ProcessGroup | None) -> list[float]:
    """Returns the largest of the lists of all ranks, as Python compares lists of equal length. Collective."""
    largest = torch.tensor(own, dtype=torch.float64, device="cpu")
    for distance in _distances(dist.get_world_size(group)):
        other = _swap(largest, torch.empty_like(largest), distance=distance, group=group)
        largest = max(largest, other, key=Tensor.tolist)
    return largest.tolist()


def _distances(ranks: int) -> list[int]:
    """Returns 1, 2, 4, … below `ranks`: how far apart the ranks are that exchange messages in each round."""
    return [1 << number for number in range((ranks - 1).bit_length())]


def _swap(sent: Tensor, received: Tensor, *, distance: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sends to the rank `distance` below, receives from the rank `distance` above, and returns `received`."""
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    works = (
        dist.irecv(received, group=group, group_src=(place + distance) % ranks, tag=ROUND),
        dist.isend(sent, group=group, group_dst=(place - distance) % ranks, tag=ROUND),
    )
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
    return received
