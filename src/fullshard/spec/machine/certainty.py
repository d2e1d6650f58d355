"""Certainty of predicted speeds: how far they were from published ones, by size and number of nodes."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.value import FrozenModel, PositiveInt
from fullshard.system.small_files import read_toml

FILE = Path(__file__).with_name("certainty.toml")


class Spread(FrozenModel):
    """Deviations of predicted speeds from published ones: `low` to `high`, of `rows` rows."""

    rows: PositiveInt
    low: float
    high: float


class CertaintyTable(FrozenModel):
    """The contents of certainty.toml.

    chips: beginnings of the names of the chips of the rows
    parameters: the least size of a model of which `one_node` and `several_nodes` hold
    all: the worst of all rows
    mixtures: the worst of the rows of mixtures of experts, which are in no other spread
    """

    chips: tuple[str, ...]
    parameters: PositiveInt
    all: Spread
    one_node: Spread
    several_nodes: Spread
    mixtures: Spread


class Certainty(NamedTuple):
    """Expected deviation of a predicted speed from a measured one, `low` to `high` as fractions.

    grounds: the rows that it is from, as text
    """

    low: float
    high: float
    grounds: str

    @property
    def text(self) -> str:
        """The deviation and its grounds, as `predicted 11 % too low to 28 % too high, as are …`."""
        low, high = f"{-100 * self.low:.0f} % too low", f"{100 * self.high:.0f} % too high"
        return f"predicted {low} to {high}, as are {self.grounds}"


@cache
def read_certainty() -> CertaintyTable:
    """Reads certainty.toml of this package."""
    return CertaintyTable.parse(read_toml(FILE), source=str(FILE))


def certainty_of(spec: ModelSpec, hardware: Hardware) -> Certainty | None:
    """Returns the expected deviation of the predicted speed of a model, as `speed_certainty` does."""
    return speed_certainty(spec.numel, hardware, mixture=spec.is_mixture)


def speed_certainty(numel: int, hardware: Hardware, *, mixture: bool = False) -> Certainty | None:
    """Returns the expected deviation of a predicted speed of a model of `numel` parameters; None on a CPU.

    Of a size or chip without published rows, it is the worst of all rows, which may still be too little.

    mixture: whether the model is a mixture of experts. There are too few rows of them for parts of these: the
        deviation is the worst of them and of all other rows.
    """
    if hardware.device == "cpu":
        return None
    table = read_certainty()
    if mixture:
        every, few = table.all, table.mixtures
        grounds = (
            f"the worst two of {every.rows} published rows of other models (only {few.rows} of mixtures were "
            "compared, with evenly chosen experts)"
        )
        return Certainty(min(every.low, few.low), max(every.high, few.high), grounds)
    if not any(hardware.chip.name.startswith(name) for name in table.chips):
        why = f"none on {hardware.chip.name}"
    elif numel < table.parameters:
        why = "too few of such models"
    else:
        one = hardware.nodes == 1
        spread = table.one_node if one else table.several_nodes
        where = "one node" if one else "several nodes"
        return Certainty(spread.low, spread.high, f"90 % of {spread.rows} published rows on {where}")
    return Certainty(
        table.all.low, table.all.high, f"the worst two of {table.all.rows} published rows ({why})"
    )
