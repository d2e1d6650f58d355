"""Certainty of predicted speeds: how far they were from published ones, by the size of the model."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from fullshard.spec.hardware import Hardware
from fullshard.spec.toml_file import read_toml
from fullshard.spec.value import FrozenModel, PositiveInt

FILE = Path(__file__).with_name("certainty.toml")


class Spread(FrozenModel):
    """Deviations of predicted speeds from published ones: `low` to `high`, of `rows` rows."""

    rows: PositiveInt
    low: float
    high: float


class SizeSpread(Spread):
    """Deviations of 90 % of the rows of models from `parameters[0]` to below `parameters[1]`."""

    parameters: tuple[PositiveInt, PositiveInt]


class CertaintyTable(FrozenModel):
    """The contents of certainty.toml."""

    chips: tuple[str, ...]
    all: Spread
    size: tuple[SizeSpread, ...]


class Certainty(NamedTuple):
    """Expected deviation of a predicted speed, `low` to `high` as fractions, and its grounds as text."""

    low: float
    high: float
    grounds: str


@cache
def read_certainty() -> CertaintyTable:
    """Reads certainty.toml of this package."""
    return CertaintyTable.parse(read_toml(FILE), source=str(FILE))


def speed_certainty(numel: int, hardware: Hardware) -> Certainty | None:
    """Returns the expected deviation of a predicted speed of a model of `numel` parameters; None on a CPU.

    Of a size or chip without published rows, it is the worst of all rows, which may still be too little.
    """
    if hardware.device == "cpu":
        return None
    table = read_certainty()
    if any(hardware.chip.name.startswith(name) for name in table.chips):
        for one in table.size:
            if one.parameters[0] <= numel < one.parameters[1]:
                return Certainty(one.low, one.high, f"90 % of {one.rows} published rows of such models")
        why = "none of such models"
    else:
        why = f"none on {hardware.chip.name}"
    return Certainty(table.all.low, table.all.high, f"the worst of {table.all.rows} published rows; {why}")
