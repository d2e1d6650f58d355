"""The box of each rank is what FSDP2 gives it, also where two axes cut one dim unevenly."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.distributed.shard_boxes import cuts_of_placements, own_box
from fullshard.distributed.tensors import local_tensor, shard_offsets, zeros_sharded_like
from fullshard.errors import ShardError
from fullshard.spec.shard_layout import cut_box


@pytest.mark.parametrize("rows", range(14))
def test_the_last_cut_divides_what_the_first_left_as_torch_chunk_does(rows: int) -> None:
    whole = torch.arange(rows)
    for outer, inner in itertools.product(range(1, 5), repeat=2):
        sizes = (outer, 2, inner)
        for place, copy, part in itertools.product(*map(range, sizes)):
            (begin, other), (length, width) = cut_box(
                (rows, 3), ((2, 0), ()), sizes=sizes, coordinate=(place, copy, part)
            )
            left = chunk(chunk(whole, inner, part), outer, place)
            assert whole[begin : begin + length].tolist() == left.tolist(), (sizes, place, part)
            assert (other, width) == (0, 3)


def chunk(tensor: Tensor, count: int, number: int) -> Tensor:
    """As FSDP2: fewer parts than ranks leave the last ranks without rows."""
    chunks = tensor.chunk(count)
    return chunks[number] if number < len(chunks) else tensor[:0]


class Strided(Shard):
    """A shard over an axis that cuts last, as the one of FSDP2."""

    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        self.split_factor = split_factor


@pytest.mark.parametrize(
    ("placements", "cuts"),
    [
        ((Replicate(), Strided(0, 2), Shard(0)), ((2, 1), ())),
        ((Replicate(), Shard(0), Shard(1)), ((1,), (2,))),
        ((Shard(0), Replicate(), Shard(0)), ((0, 2), ())),
        ((Strided(1, 6), Shard(1), Shard(1)), ((), (1, 2, 0))),
        ((Replicate(), Replicate(), Replicate()), ((), ())),
    ],
)
def test_strided_shards_are_cut_after_the_others(placements: tuple[Placement, ...], cuts: Any) -> None:
    assert cuts_of_placements(placements, (4, 3, 2), dims=2) == cuts


def test_a_stride_that_is_not_the_number_of_parts_is_refused() -> None:
    with pytest.raises(ShardError, match="not boxes"):
        cuts_of_placements((Strided(0, 3), Shard(0)), (4, 2), dims=2)


def compare_with_fsdp2(shape: tuple[int, ...], most: int) -> None:
    """Numbered elements, which the inner axis divides by rows or columns and FSDP2 by rows."""
    names = ("copies", "outer", "inner")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    inner = mesh["inner"]
    for rows, dim in itertools.product(range(1, most), (0, 1)):
        whole = torch.arange(rows * 3.0).view(rows, 3)
        part = chunk(whole.movedim(dim, 0), inner.size(), inner.get_local_rank()).movedim(0, dim)
        module = nn.Linear(1, 1, bias=False)
        divided = DTensor.from_local(
            part.contiguous(), inner, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        module.weight = nn.Parameter(divided)
        fully_shard(module, mesh=mesh[names[:-1]])
        weight = module.weight.detach()
        assert isinstance(weight, DTensor)
        local = local_tensor(weight)
        start, size = own_box(weight.shape, weight.device_mesh, placements=weight.placements)
        assert torch.equal(whole[tuple(slice(b, b + n) for b, n in zip(start, size, strict=True))], local)
        assert shard_offsets(weight) == start
        for other in (whole.shape, (rows, 1)):
            zeros = zeros_sharded_like(weight, other, dtype=torch.float64)
            assert (zeros.shape, zeros.stride()) == (other, torch.empty(other).stride())
            assert local_tensor(zeros).shape == (local.shape[0], local.shape[1] if other[1] > 1 else 1)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 3, 2), (6, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:.*zero elements:UserWarning")
def test_each_rank_has_the_box_that_fsdp2_gives_it(shape: tuple[int, ...], ranks: Any) -> None:
    """With 1 to 13 rows. Torch's own rule is wrong about 7 and 13 over (3, 2)."""
    ranks(6).run(compare_with_fsdp2, shape, 14)
