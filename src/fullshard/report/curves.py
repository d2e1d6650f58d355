"""Curves of a run as points (step, value), thinned, smoothed and scaled for a chart of a fixed size."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]

# A logarithmic axis is chosen if the values span at least this factor.
_LOG_FROM = 3.0
_MOST_TICKS = 5


def thin_to_extremes(points: Points, columns: int) -> Points:
    """Returns at most 2 * columns of the points: the lowest and the highest of each column.

    A curve of any length so keeps a constant size, and every spike that is in it.
    """
    if len(points) <= 2 * columns:
        return points
    kept: list[tuple[float, float]] = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def thin_evenly(points: Points, count: int) -> Points:
    """Returns at most `count` of the points, at equal distances, with the first and the last."""
    if len(points) <= count:
        return points
    return [points[index * (len(points) - 1) // (count - 1)] for index in range(count)]


def smooth_centred(points: Points, *, reach: int) -> Points:
    """Returns the mean of each point and `reach` points on either side of it; fewer of both at the ends.

    The window is symmetric everywhere, so the curve lags behind nothing.
    """
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smooth: list[tuple[float, float]] = []
    for index, (step, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)
        low, high = index - side, index + side + 1
        smooth.append((step, (sums[high] - sums[low]) / (high - low)))
    return smooth


def wants_log_axis(values: Iterable[float]) -> bool:
    """Returns whether positive `values` span so many times the smallest that a linear axis hides much."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) >= _LOG_FROM * min(found)


def axis_ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    """Returns round values from `low` to `high`, two to five where there are that many."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            ticks = [digit * 10.0**power for power in decades for digit in digits]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) <= _MOST_TICKS:
                break
        else:
            ticks = ticks[:: -(-len(ticks) // _MOST_TICKS)]
        if len(ticks) >= 2:
            return ticks
    raw = (high - low) / 4
    if not raw > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
    first = math.ceil(low / distance - 1e-9)
    return [index * distance for index in range(first, math.floor(high / distance + 1e-9) + 1)]
