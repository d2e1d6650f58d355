"""Links between ranks: their peaks, and the rates of collectives over them. Figures: `links.toml`."""

from functools import cache
from pathlib import Path

from pydantic import Field

from fullshard.spec.hardware import CollectiveRate, Link
from fullshard.spec.small_files import SETTINGS_BYTES, parse_toml, read_text
from fullshard.spec.value import FrozenModel, NonNegativeFloat, PositiveFloat


class ListedLink(FrozenModel):
    """One entry of `links.toml`, whose head explains each field."""

    bytes_per_second: PositiveFloat
    efficiency: float = Field(gt=0, le=1)
    base_seconds: NonNegativeFloat
    hop_seconds: NonNegativeFloat
    source: str


@cache
def listed_links() -> dict[str, ListedLink]:
    """Returns all links of the catalog, by name."""
    text = read_text(Path(__file__).with_name("links.toml"), most_bytes=SETTINGS_BYTES)
    entries = parse_toml(text)
    return {name: ListedLink.parse(entry, source=f"links.toml, {name}") for name, entry in entries.items()}


def find_link(name: str) -> Link:
    """Returns the catalog link `name` with the rates of its collectives. Raises KeyError for an unknown name.

    An all-reduce is a reduce-scatter and an all-gather: a ring moves each byte twice, so it has half the rate
    and twice the hops. Switches that reduce (NVLink SHARP) are faster; the catalog does not assume them.
    """
    entry = listed_links()[name]
    rate = entry.bytes_per_second * entry.efficiency
    once = CollectiveRate(
        base_seconds=entry.base_seconds, hop_seconds=entry.hop_seconds, bytes_per_second=rate
    )
    twice = CollectiveRate(
        base_seconds=entry.base_seconds, hop_seconds=2 * entry.hop_seconds, bytes_per_second=rate / 2
    )
    return Link(
        name=name,
        bytes_per_second=entry.bytes_per_second,
        all_gather=once,
        reduce_scatter=once,
        all_reduce=twice,
        source=entry.source,
    )
