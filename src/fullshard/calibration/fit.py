"""Fits a collective's seconds with latency and bandwidth."""

from collections.abc import Sequence
from typing import NamedTuple

from fullshard.spec.hardware import CollectiveRate, Point


class Sample(NamedTuple):
    """One measured collective.

    whole_bytes: unsharded size
    seconds: duration
    """

    whole_bytes: int
    seconds: float


def fit_collective(samples: Sequence[Sample], *, ranks: int) -> tuple[CollectiveRate, float]:
    """Returns the rate of a collective, and the largest relative error of its linear fit on `samples`.

    With x = B (n - 1) / n bytes received, least squares on the relative error of latency + x / rate:

        minimise  sum ((a + b x) / t - 1)^2,   a >= 0, b > 0

    A single number of ranks cannot separate the latency of a collective from that of its hops. All of it
    counts as hops, so that the time of more ranks is never underestimated. The samples themselves are kept as
    the curve, each at most as long as the larger ones, because other load on the machine only adds time.
    """
    assert samples, "nothing was measured"
    assert ranks > 1, "one rank has no collective"
    ordered = sorted(samples)
    xs = [sample.whole_bytes * (ranks - 1) / ranks for sample in ordered]
    ts = [min(sample.seconds for sample in ordered[i:]) for i in range(len(ordered))]
    latency, per_byte = _line(xs, ts)
    error = max(abs((latency + per_byte * x) / t - 1) for x, t in zip(xs, ts, strict=True))
    rate = CollectiveRate(
        base_seconds=0.0,
        hop_seconds=latency / (ranks - 1),
        bytes_per_second=1 / max(per_byte, 1e-15),
        curve=tuple(Point(x, float(f"{x / t:.4g}")) for x, t in zip(xs, ts, strict=True)),
        curve_ranks=ranks,
    )
    return rate, error


def _line(xs: Sequence[float], ts: Sequence[float]) -> tuple[float, float]:
    """Returns (a, b) of a + b x, fitted with weights 1 / t^2."""
    weights = [1 / t**2 for t in ts]
    s, sx = sum(weights), sum(w * x for w, x in zip(weights, xs, strict=True))
    sxx = sum(w * x * x for w, x in zip(weights, xs, strict=True))
    st = sum(w * t for w, t in zip(weights, ts, strict=True))
    sxt = sum(w * x * t for w, x, t in zip(weights, xs, ts, strict=True))
    determinant = s * sxx - sx * sx
    if determinant > 0:
        a, b = (sxx * st - sx * sxt) / determinant, (s * sxt - sx * st) / determinant
        if a >= 0 and b > 0:
            return a, b
        if b <= 0:
            return st / s, 0.0
    return 0.0, sxt / sxx
