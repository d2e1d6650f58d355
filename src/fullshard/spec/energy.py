"""Electric power of a rank while it trains, assumed from what its board is rated for."""

from typing import Annotated

from pydantic import Field

from fullshard.spec.hardware import Chip
from fullshard.spec.rates import read_default_rate_figures
from fullshard.spec.value import FrozenModel, PositiveFloat


class RankPower(FrozenModel):
    """Power of one rank with its share of the node, assumed and not measured.

        watts = board_watts * node_over_boards * pue

    board_watts: what the chip's board is rated for
    node_over_boards: what a node draws in training, over what its boards are rated for (rates.toml)
    pue: what the building draws over what its machines draw (power usage effectiveness); 1: machines alone
    """

    board_watts: PositiveFloat
    node_over_boards: PositiveFloat
    pue: Annotated[float, Field(ge=1, le=10)] = 1.0

    @property
    def watts(self) -> float:
        return self.board_watts * self.node_over_boards * self.pue


def rank_power(chip: Chip, *, pue: float | None = None) -> RankPower | None:
    """Returns the power of a rank on `chip`; None if nothing says what its board is rated for.

    Raises SpecError for a `pue` below 1.
    """
    if chip.board_watts is None:
        return None
    ratio = read_default_rate_figures().energy.node_over_boards
    figures = {"board_watts": chip.board_watts, "node_over_boards": ratio, "pue": pue or 1.0}
    return RankPower.parse(figures, source="--pue")
