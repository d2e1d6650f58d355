"""Interpolates values that are sums of known terms: finds them at a new point from those at other points.

If each value is a sum of the same terms, such as a + b / E, with coefficients of its own, one weighted sum of
the values at as many points as there are terms is exact for all of them at any other point.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

_MOST_PARTS = 1 << 20  # largest denominator of a quotient, such as rows per expert


class Weights(NamedTuple):
    """Weights of values in a sum, as numerators of one denominator."""

    numerators: tuple[int, ...]
    denominator: int


def find_weights(points: Sequence[Sequence[Fraction | int]], target: Sequence[Fraction | int]) -> Weights:
    """Returns the weights with which the terms at `points` add up to those at `target`.

    Raises ZeroDivisionError unless exactly one set of weights does.

    points: the terms at each point; there are as many points as terms
    target: the terms at the new point
    """
    rows = [[Fraction(one) for one in terms] for terms in zip(*points, target, strict=True)]
    for at in range(len(rows)):
        pivot = next((row for row in rows[at:] if row[at]), rows[at])
        rows.remove(pivot)
        pivot = [value / pivot[at] for value in pivot]
        rows = [[a - row[at] * b for a, b in zip(row, pivot, strict=True)] for row in rows]
        rows.insert(at, pivot)
    denominator = lcm(*(row[-1].denominator for row in rows))
    return Weights(tuple(int(row[-1] * denominator) for row in rows), denominator)


def combine(values: Sequence[Any], weights: Weights) -> Any:
    """Returns the weighted sum of numbers, or of each number in nests of equal structure.

    weights: they add up to 1, so values that are equal stay as they are

    Raises ValueError for nests that differ in structure, values that differ and are not numbers, and integers
    whose sum is not an integer.
    """
    first = values[0]
    if all(one == first for one in values):
        return first
    if is_dataclass(first) and not isinstance(first, type):
        own = {one.name: [getattr(value, one.name) for value in values] for one in fields(first)}
        return replace(first, **{name: combine(parts, weights) for name, parts in own.items()})
    if isinstance(first, list | tuple):
        parts = [combine(parts, weights) for parts in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if type(first) not in (int, float):
        raise ValueError(f"{values} are not numbers")
    exact = [_as_exact(value) for value in values]
    total = sum(weight * value for weight, value in zip(weights.numerators, exact, strict=True))
    if isinstance(first, float):
        return float(total / weights.denominator)
    if total % weights.denominator:
        raise ValueError(f"{values} give {total} / {weights.denominator}")
    return total // weights.denominator


def _as_exact(value: float) -> int | Fraction:
    """Returns the number that `value` stands for: it may be a quotient that was rounded."""
    return int(value) if value == int(value) else Fraction(value).limit_denominator(_MOST_PARTS)
