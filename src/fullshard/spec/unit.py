"""The plan's settings for one unit, including its overrides."""

from typing import Self

from fullshard.spec.plan import Plan, Precision
from fullshard.spec.run import Strategy, UnitOverride
from fullshard.spec.value import FrozenModel


class UnitSettings(FrozenModel):
    """The mesh degrees, dtypes and reshard policy of one unit."""

    replicate_degree: int
    shard_degree: int
    reshard_after_forward: bool | int
    precision: Precision

    @classmethod
    def of(cls, plan: Plan, override: UnitOverride | None, *, kept: bool) -> Self:
        """Returns the settings of a unit.

        kept: the unit is used last in forward and first in backward, so that it would be gathered again at
            once if it were freed
        """
        unsharded = override is not None and override.strategy is not None
        named = override.precision if override is not None else None
        return cls(
            replicate_degree=plan.data_parallel if unsharded else plan.replicate_degree,
            shard_degree=1 if unsharded else plan.shard_degree,
            reshard_after_forward=_reshard_after_forward(plan, override, kept=kept),
            precision=plan.precision if named is None else Precision.of(named, plan.run),
        )


def _reshard_after_forward(plan: Plan, override: UnitOverride | None, *, kept: bool) -> bool | int:
    if override is not None and override.reshard_after_forward is not None:
        return override.reshard_after_forward
    if override is not None and override.strategy is not None:
        return plan.strategy is not Strategy.ZERO1
    return False if kept else plan.reshard_after_forward
