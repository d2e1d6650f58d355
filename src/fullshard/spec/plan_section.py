"""Settings of the planner: what a chosen plan leaves free, and how many steps share the compiling."""

from fullshard.spec.value import Fraction, FrozenModel, PositiveCount


class PlanSection(FrozenModel):
    """Settings of the planner's choice.

    `memory_margin`: fraction of a device's memory that a chosen plan leaves free, because a prediction may be
        too low; 0 uses all of it. A run that pins strategy, microbatch and recompute may use all in any case.
    `compile_steps`: steps that share the seconds of compiling; unset, `train.steps`
    """

    memory_margin: Fraction = 0.05
    compile_steps: PositiveCount | None = None
