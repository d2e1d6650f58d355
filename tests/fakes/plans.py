"""Plans, by what differs from the default."""

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


def plan_of(world_size: int, *overrides: str) -> Plan:
    """`plan_of(2, "sharding.strategy=zero1")`; fp32 unless a precision is given."""
    run = Run.load(overrides=["train.global_batch=24", "precision.mode=fp32", *overrides])
    return Plan.from_run(run, world_size=world_size)


STRATEGIES: dict[str, tuple[str, ...]] = {
    "no_shard": ("sharding.strategy=no_shard",),
    "zero1": ("sharding.strategy=zero1",),
    "shard_grad_op": ("sharding.strategy=shard_grad_op",),
    "full_shard": ("sharding.strategy=full_shard",),
    "hybrid_shard": ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
    "hybrid_shard_zero2": ("sharding.strategy=hybrid_shard_zero2", "sharding.shard_degree=2"),
}
