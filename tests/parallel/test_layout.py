"""layout(model): who holds what."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard.parallel.layout import ShardingTable, sharding_table
from fullshard.parallel.materialize import materialize
from fullshard.training.shard import shard
from tests.fakes.architectures import on_meta
from tests.fakes.plans import STRATEGIES, plan_of


def sharded_layout(name: str, *settings: str) -> ShardingTable:
    return sharding_table(shard(on_meta(name), plan_of(dist.get_world_size(), *settings)))


def test_each_parameter_is_told_once_with_its_unit_and_its_part(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(sharded_layout, "odd_tied")
    rows = {row.parameter: row for row in first}
    assert len(rows) == len(first) == len(list(on_meta("odd_tied").parameters()))
    up = rows["layers.0.up.weight"]
    assert (up.unit, up.global_shape, up.local_shape) == ("layers.0", (7, 10), (4, 10))
    assert (up.dtype, up.device, up.placement, up.local_bytes) == ("float32", "cpu", "dp_shard=S(0)", 160)
    assert {row.parameter: row for row in second}["layers.0.up.weight"].local_shape == (3, 10)
    assert rows["embedding.weight"].unit == "(root)"
    assert rows["embedding.weight"].aliases == ("head.weight",)
    assert not rows["layers.0.frozen.weight"].trainable
    assert (rows["temperature"].placement, rows["temperature"].local_shape) == ("whole", ())


def test_placements_name_the_axes_of_the_mesh(ranks: Callable[..., Any]) -> None:
    overrides = 'sharding.units.overrides=[{match="embedding", strategy="no_shard"}]'
    first, *_ = ranks(4).run(sharded_layout, "decoder", *STRATEGIES["hybrid_shard"], overrides)
    rows = {row.parameter: row for row in first}
    assert rows["norm.weight"].unit == "norm+head"
    assert rows["norm.weight"].placement == "dp_replicate=R dp_shard=S(0)"
    assert rows["norm.weight"].local_shape == (4,)
    assert rows["embedding.weight"].local_shape == rows["embedding.weight"].global_shape


def test_the_local_bytes_of_all_ranks_are_the_model(ranks: Callable[..., Any]) -> None:
    layouts = ranks(3).run(sharded_layout, "decoder")
    assert sum(one.local_bytes for one in layouts) == sum(p.nbytes for p in on_meta("decoder").parameters())


def test_it_prints_as_a_table(ranks: Callable[..., Any]) -> None:
    first, _ = ranks(2).run(sharded_layout, "perceptron", "precision.mode=bf16_pure")
    assert str(first).splitlines() == [
        "unit  parameter  global  local  dtype     device  placement",
        "0     0.weight   8×6     4×6    bfloat16  cpu     dp_shard=S(0)",
        "0     0.bias     8       4      bfloat16  cpu     dp_shard=S(0)",
        "2     2.weight   8×8     4×8    bfloat16  cpu     dp_shard=S(0)",
        "2     2.bias     8       4      bfloat16  cpu     dp_shard=S(0)",
        "3     3.weight   2×8     1×8    bfloat16  cpu     dp_shard=S(0)",
        "3     3.bias     2       1      bfloat16  cpu     dp_shard=S(0)",
        "146 parameters in 3 units; this rank holds 146 B",
    ]


def test_a_model_that_is_not_sharded_is_whole_in_no_unit() -> None:
    rows = list(sharding_table(materialize(on_meta("decoder"), seed=0)))
    assert {(row.unit, row.placement) for row in rows} == {("", "whole")}
    assert all(row.local_shape == row.global_shape for row in rows)
