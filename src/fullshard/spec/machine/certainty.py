"""Deviation of predicted speeds: how far they were from published ones, by size and number of nodes."""

from typing import NamedTuple

from fullshard.spec.machine.catalog import read_machine_tables
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan


class SpeedDeviation(NamedTuple):
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


def speed_deviation_of_plan(spec: ModelSpec, hardware: Hardware, *, plan: Plan) -> SpeedDeviation | None:
    """Returns the expected deviation of a plan's predicted speed, as `speed_deviation` does."""
    offloads = plan.run.offload.tier != "none"
    return speed_deviation(spec.numel, hardware, mixture=spec.is_mixture, offloads=offloads)


def speed_deviation(
    numel: int, hardware: Hardware, *, mixture: bool = False, offloads: bool = False
) -> SpeedDeviation | None:
    """Returns the expected deviation of a predicted speed of a model of `numel` parameters; None on a CPU.

    Of a size or chip without published rows, it is the worst of all rows, which may still be too little.

    offloads: whether optimizer state or parameters are on the host, as in no published row
    mixture: whether the model is a mixture of experts, whose deviation is that of mixtures alone
    """
    if hardware.device == "cpu":
        return None
    table = read_machine_tables("certainty")
    every, is_known = table["all"], hardware.chip.name.startswith(tuple(table["chips"]))
    if mixture:
        few = table["mixtures"]
        grounds = f"the worst two of only {few['rows']} published rows of mixtures"
        return SpeedDeviation(few["low"], few["high"], grounds)
    if is_known and not offloads and numel >= table["parameters"]:
        spread = table["one_node" if hardware.nodes == 1 else "several_nodes"]
        where = "one node" if hardware.nodes == 1 else "several nodes"
        grounds = f"90 % of {spread['rows']} published rows on {where}"
        return SpeedDeviation(spread["low"], spread["high"], grounds)
    why = "too few of such models" if is_known else f"none on {hardware.chip.name}"
    why = "none of which offloads" if offloads else why
    grounds = f"the worst two of {every['rows']} published rows ({why})"
    return SpeedDeviation(every["low"], every["high"], grounds)
