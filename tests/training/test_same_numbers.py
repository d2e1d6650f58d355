"""A sharded run computes what an unsharded one computes. Ranks import `same_numbers`, which is quicker."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.training.same_numbers import STRATEGIES, assert_same_numbers, make_run, train_sharded

MODELS = ("decoder", "tied_decoder", "odd", "odd_tied", "odd_mixture")
RECOMPUTE = ("none", "full", "selective")
ACCUMULATION = ((1, "every_microbatch"), (2, "every_microbatch"), (2, "last_microbatch"))
UNITS = ("block", "size", "names", "unsharded_head")
LOSS_CHUNK = (0, 4)  # 4 of the 9 rows of a sequence
RANKS = (1, 2, 3, 4)

Case = tuple[Any, ...]
AXES: dict[str, Sequence[Any]] = {
    "strategy": tuple(STRATEGIES),
    "model": MODELS,
    "recompute": RECOMPUTE,
    "accumulation": ACCUMULATION,
    "units": UNITS,
    "loss_chunk": LOSS_CHUNK,
    "ranks": RANKS,
}


def possible(case: dict[str, Any]) -> bool:
    if case["strategy"] in ("hybrid_shard", "hybrid_shard_zero2"):
        return case["ranks"] == 4
    return True


def all_cases() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if possible(case):
            yield case


def pairwise() -> list[dict[str, Any]]:
    """A small set of cases in which every possible pair of values of two axes occurs. Greedy."""
    number: dict[tuple[Any, ...], int] = defaultdict(lambda: 1 << len(number))
    # Sets as the bits of a number.
    cases = [
        (case, sum(number[a, case[a], b, case[b]] for a, b in itertools.combinations(AXES, 2)))
        for case in all_cases()
    ]
    missing = (1 << len(number)) - 1
    chosen: list[dict[str, Any]] = []
    while missing:
        best = max(cases[len(chosen) % 7 :: 7], key=lambda one: (one[1] & missing).bit_count())
        if not best[1] & missing:
            best = max(cases, key=lambda one: (one[1] & missing).bit_count())
        chosen.append(best[0])
        missing &= ~best[1]
    return chosen


def covering(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases with a value of an axis that none before them has: together they have all values."""
    seen: set[tuple[str, Any]] = set()
    chosen: list[dict[str, Any]] = []
    for case in cases:
        chosen += [] if seen >= case.items() else [case]
        seen.update(case.items())
    return chosen


def name_of(case: dict[str, Any]) -> str:
    return "-".join("".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in case.values())


def check(case: dict[str, Any], ranks: Any) -> None:
    run = make_run(**case)
    assert_same_numbers(case["model"], ranks(case["ranks"]).run(train_sharded, case["model"], run))


@pytest.mark.parametrize("case", covering(pairwise()), ids=name_of)
def test_sharded_run_equals_unsharded_run(case: dict[str, Any], ranks: Any) -> None:
    check(case, ranks)


# Thousands of tests would cost seconds wherever tests are collected.
WITHIN = ("units", "loss_chunk")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case for case in all_cases() if all(case[axis] == AXES[axis][0] for axis in WITHIN)], ids=name_of
)
def test_sharded_run_equals_unsharded_run_in_the_full_cross(case: dict[str, Any], ranks: Any) -> None:
    for values in itertools.product(*(AXES[axis] for axis in WITHIN)):
        check(case | dict(zip(WITHIN, values, strict=True)), ranks)
