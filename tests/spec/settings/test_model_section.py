"""Sizes of decoders and of their parts."""

import pytest

from fullshard.spec.settings.model_section import expert_shard_dim


@pytest.mark.parametrize(("keeps_rows", "dim"), [(False, 2), (True, 0)])
def test_experts_are_sharded_in_a_dim_that_ranks_divide_except_the_dim_of_packed_rows(
    keeps_rows: bool, dim: int
) -> None:
    assert expert_shard_dim((32, 2880, 5760), 128, keeps_rows=keeps_rows) == dim
