"""Settings of the planner: what it leaves free, what it assumes of compiling and of routing."""

from fullshard.spec.value import Fraction, FrozenModel, NonNegativeFloat, PositiveCount


class PlanSection(FrozenModel):
    """Settings of the planner's choice.

    `memory_margin`: fraction of a device's memory that a chosen plan leaves free, because a prediction may be
        too low; 0 uses all of it. A run that pins strategy, microbatch and recompute may use all in any case.
    `compile_steps`: steps that share the seconds of compiling; unset, `train.steps`
    `routing_spread`: where ranks divide the experts of a mixture, the standard deviation of the rows of one
        expert, over their mean; 0 for forced balance. The default is the mean of three published routers.
    """

    memory_margin: Fraction = 0.05
    compile_steps: PositiveCount | None = None
    routing_spread: NonNegativeFloat = 0.19
