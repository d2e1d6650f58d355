"""Ranks that are nowhere."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.dryrun.ranks import LazyChunks, fake_process_group


@given(st.integers(1, 40), st.integers(1, 12))
def test_chunks_are_torchs_and_empty_behind(rows, count):
    whole = torch.arange(rows * 3).view(rows, 3)
    theirs = torch.chunk(whole, count)
    ours = [LazyChunks(whole, count, dim=0)[index] for index in range(count)]
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=False))
    assert [one.numel() for one in ours[len(theirs) :]] == [0] * (count - len(theirs))


@pytest.mark.parametrize(("n", "rank"), [(1, 0), (16_384, 9_999)])
def test_this_process_is_one_of_many(n, rank):
    with fake_process_group(n, rank=rank):
        assert (dist.get_world_size(), dist.get_rank()) == (n, rank)
        dist.all_reduce(torch.ones(2))
    assert not dist.is_initialized()
