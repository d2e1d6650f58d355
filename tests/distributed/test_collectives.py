"""The collectives for gloo equal the functional ones, which devices use: both run on gloo here."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.distributed.collectives import exchange_row_parts, gather_parts, reduce_parts

SENT = {
    # rows from each rank (in turn) to each rank
    "all": [[2, 3], [1, 4]],
    "a rank sends none": [[0, 0], [1, 4]],
    "a rank gets none": [[2, 0], [1, 0]],
    "none": [[0, 0], [0, 0]],
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def gather_both_ways(group: str) -> list[torch.Tensor]:
    part = numbers(3, 4).t()  # not contiguous
    return [gather_parts(part, group, direct=direct) for direct in (True, False)]


def reduce_both_ways(group: str) -> list[torch.Tensor]:
    return [reduce_parts(numbers(2, 3, 4), group, direct=direct) for direct in (True, False)]


def exchange_both_ways(group: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for case in SENT.values():
        sent, received = case[dist.get_rank()], [row[dist.get_rank()] for row in case]
        for rows in (numbers(sum(sent), 5), numbers(sum(sent), 5, dtype=torch.int64)):
            for direct in (True, False):
                found.append(exchange_row_parts(rows, sent, received=received, group=group, direct=direct))
    return found


def run_in_subgroup(kind: str) -> list[torch.Tensor]:
    return globals()[kind](dist.new_group([0, 1]).group_name)


@pytest.mark.parametrize("kind", ["gather_both_ways", "reduce_both_ways", "exchange_both_ways"])
def test_direct_collectives_equal_functional_ones(kind: str, ranks: Any) -> None:
    by_rank = ranks(2).run(run_in_subgroup, kind)
    for found in by_rank:
        for direct, functional in zip(found[::2], found[1::2], strict=True):
            assert direct.shape == functional.shape
            assert torch.equal(direct, functional)
    if kind == "exchange_both_ways":
        assert [len(one) for one in by_rank[1][::4]] == [7, 4, 0, 0], "rows to rank 1 in each case"
