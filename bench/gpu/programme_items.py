"""Lists all items, and finds those of a call by number of ranks, card and name."""

from fnmatch import fnmatch

from bench.gpu.items import Card, Item, at_card, toy
from bench.gpu.one_gpu import ONE_GPU
from bench.gpu.several_gpus import SEVERAL_GPUS

ITEMS = (*ONE_GPU, *SEVERAL_GPUS)


def find_item(name: str, *, card: Card, is_toy: bool) -> Item:
    """Returns an item at the size of the card, or of CPU ranks."""
    item = at_card(next(item for item in ITEMS if item.name == name), card)
    return toy(item) if is_toy else item


def choose_items(patterns: list[str] | None, *, ranks: int, is_toy: bool) -> list[Item]:
    """Returns the items whose name matches any of the patterns, in order of worth; all without patterns.

    With one rank those for one GPU, with more those for several, unless patterns name others; at toy
    size all.
    """
    for_these = [one for one in ITEMS if one.ranks <= ranks and (is_toy or (one.ranks > 1) == (ranks > 1))]
    if patterns is None:
        return for_these
    return [one for one in ITEMS if one.ranks <= ranks and any(fnmatch(one.name, part) for part in patterns)]
