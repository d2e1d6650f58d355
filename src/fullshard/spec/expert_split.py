"""How the stacked experts of a mixture are divided over ranks."""

from fullshard.errors import PlanError


def expert_shard_dim(shape: tuple[int, ...], shard_degree: int) -> int:
    """Returns the dim in which FSDP2 shards stacked experts (experts, ...) over `shard_degree` ranks.

    With fewer experts than ranks, shards of dim 0 would leave ranks without any. So it is the first dim that
    the ranks divide evenly, which FSDP2 requires of all dims except the first; or dim 0 if there is none.
    """
    return next((dim for dim, size in enumerate(shape) if size % shard_degree == 0), 0)


def indivisible_experts_error(experts: int, *, ranks: int, key: str) -> PlanError:
    """Returns the error for a number of experts that `ranks` ranks cannot divide evenly."""
    if not experts:
        return PlanError(
            "the model has no experts to divide over ranks.",
            got=f"sharding.expert_parallel = {ranks}, {key} = 0",
            fix="sharding.expert_parallel = 1, or a mixture of experts",
        )
    divisors = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]
    return PlanError(
        f"{experts} experts cannot be divided over {ranks} ranks.",
        got=f"sharding.expert_parallel = {ranks}, {key} = {experts}",
        why="each rank has equally many experts",
        fix=f"sharding.expert_parallel = one of {divisors}",
    )
