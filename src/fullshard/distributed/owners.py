"""Whole matrices of sharded tensors on their owners, and the way there and back: see `spec.dealing`.

[Note: one group for all waves]
A wave is one exchange there and one back, over all ranks. Ranks of other replicas, and those that share no
matrix of the wave, send each other nothing. So no mesh needs a group of its own, whatever its axes are: rows
or columns, experts, ranks that share matmuls.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank, world_size
from fullshard.distributed.collectives import exchange_row_parts
from fullshard.distributed.shard_boxes import ShardPlacer
from fullshard.spec.dealing import DealtMatrix, TensorLayout, build_tensor_layout
from fullshard.spec.shard_layout import Box, RankMesh


def find_layouts(tensors: Iterable[Tensor]) -> list[TensorLayout]:
    """Returns the layout of each tensor, which follows from its mesh and placements."""
    placer, found = ShardPlacer(), list[TensorLayout]()
    for one in tensors:
        cuts, mesh = ((),) * one.ndim, RankMesh((1,), (rank(),))
        if isinstance(one, DTensor):
            placed = placer.place(one)
            assert placed is not None, "each rank has a part of the matrices that it updates"
            cuts, mesh = placed[0].cuts, placer.meshes[placed[0].mesh]
        found.append(build_tensor_layout(tuple(one.shape), cuts, mesh=mesh))
    return found


class Wave:
    """This rank's part in a wave: the parts that it gives, in the order of owners, and what it owns."""

    def __init__(self, matrices: Iterable[DealtMatrix]) -> None:
        own, matrices = rank(), list(matrices)
        given = (one for one in matrices if own in one.parts)
        self.given = sorted(given, key=lambda one: one.owner)
        self.owned = [one for one in matrices if one.owner == own]
        self._sent, self._received = [0] * world_size(), [0] * world_size()
        for one in self.given:
            self._sent[one.owner] += one.parts[own].numel
        arriving = [(source, i, box) for i, one in enumerate(self.owned) for source, box in one.parts.items()]
        # (index of an owned matrix, part of it), in the order of ranks. Consecutive rows of ranks are merged.
        self._pieces = list[tuple[int, Box]]()
        for source, number, box in sorted(arriving):
            self._received[source] += box.numel
            last, (begin, size) = self._pieces[-1] if self._pieces else (-1, box)
            if last == number and (begin[0] + size[0], begin[1], size[1]) == (*box.begin, box.size[1]):
                del self._pieces[-1]
                box = Box(begin, (size[0] + box.size[0], size[1]))
            self._pieces.append((number, box))

    def gather(self, parts: Iterable[Tensor], *, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns the matrices that this rank owns, in `dtype`. Collective.

        parts: this rank's part of each matrix in `given`; a later one is asked for once an earlier is copied
        """
        given = self._join_given(parts, torch.empty(sum(self._sent), dtype=dtype, device=device))
        arrived = _exchange(given, self._sent, received=self._received)
        del given  # before there are matrices
        wholes = [torch.empty(one.shape, dtype=dtype, device=device) for one in self.owned]
        for number, box, piece in self._iterate_pieces(arrived):
            wholes[number][box.slices] = piece
        return wholes

    def scatter(self, wholes: list[Tensor], *, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns this rank's part of each matrix in `given`, of the owners' `wholes`. Collective.

        wholes: those of `owned`; the list is emptied, so that their memory is free early
        """
        flat = torch.empty(sum(self._received), dtype=dtype, device=device)
        for number, box, piece in self._iterate_pieces(flat):
            piece.copy_(wholes[number][box.slices])
        wholes.clear()
        return self._split_given(_exchange(flat, self._received, received=self._sent))

    def _join_given(self, parts: Iterable[Tensor], flat: Tensor) -> Tensor:
        for place, part in zip(self._split_given(flat), parts, strict=True):
            place.copy_(part)
        return flat

    def _split_given(self, flat: Tensor) -> list[Tensor]:
        boxes = [one.parts[rank()] for one in self.given]
        pieces = flat.split([box.numel for box in boxes]) if boxes else ()
        return [piece.view(box.size) for piece, box in zip(pieces, boxes, strict=True)]

    def _iterate_pieces(self, flat: Tensor) -> Iterator[tuple[int, Box, Tensor]]:
        """Yields (index of an owned matrix, a part of it, its place in `flat`)."""
        places = flat.split([box.numel for _, box in self._pieces]) if self._pieces else ()
        for (number, box), place in zip(self._pieces, places, strict=True):
            yield number, box, place.view(box.size)


def _exchange(flat: Tensor, sent: list[int], *, received: list[int]) -> Tensor:
    group = dist.group.WORLD
    assert group is not None, "one rank has all matrices"
    direct = flat.device.type == "cpu"
    return exchange_row_parts(flat, sent, received=received, group=group.group_name, direct=direct)
