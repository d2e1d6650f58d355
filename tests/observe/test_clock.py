"""A rate is calls over time; the matmul peak is every rank's, measured at once."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from fullshard.observe.clock import (
    find_matmul_peak,
    measure_calls_per_second,
    measure_fastest_calls_per_second,
    measure_matmul_peak,
    measure_steady_calls_per_second,
)


@pytest.mark.parametrize("seconds", [1e-5, 0.01, 3.0])
def test_a_sustained_rate_is_calls_over_time(seconds: float):
    passed = 0.0

    def work() -> None:
        nonlocal passed
        passed += seconds

    def timer(work: Callable[[], object], calls: int) -> float:
        before = passed
        for _ in range(calls):
            work()
        return passed - before

    assert measure_calls_per_second(work, seconds=0.5, timer=timer) == pytest.approx(1 / seconds)
    assert passed <= 0.5 + 5 * seconds + 1e-9


def test_a_device_whose_clock_rises_is_measured_until_it_is_steady():
    speeds = itertools.chain([1.0] * 4, [2.0] * 4, [3.0] * 4, itertools.repeat(4.0))

    def timer(work: Callable[[], object], calls: int) -> float:
        return calls / next(speeds)

    # Each window asks four times: three single calls, and all in turn.
    rate = measure_steady_calls_per_second(lambda: None, seconds=100.0, timer=timer)
    assert rate == pytest.approx(4.0)


def test_measuring_leaves_the_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert measure_matmul_peak(torch.device("cpu"), torch.float32, seconds=0.02) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_busy_machine_does_not_lower_the_fastest_call():
    seconds = itertools.cycle([0.5, 0.01, 3.0])
    passed = 0.0

    def timer(work: Callable[[], object], calls: int) -> float:
        nonlocal passed
        taken = calls * next(seconds)
        passed += taken
        return taken

    rate = measure_fastest_calls_per_second(lambda: None, seconds=5.0, timer=timer, clock=lambda: passed)
    assert rate == pytest.approx(100.0)
    assert passed < 5.0 + 3.5


def test_a_calibrated_peak_is_not_measured_again():
    peak = find_matmul_peak(torch.device("cpu"), "fp32", calibrated={"fp32": 5e9})
    assert (peak.flops_per_second, peak.source) == (5e9, "measured")


def peak_on_this_rank() -> tuple[float, str, str]:
    peak = find_matmul_peak(torch.device("cpu"), "fp32")
    return peak.flops_per_second, peak.source, peak.device


def test_all_ranks_have_the_same_measured_peak(ranks):
    peaks = ranks(2).run(peak_on_this_rank)
    assert peaks[0] == peaks[1]
    assert peaks[0][1:] == ("measured", "cpu, 1 thread")
    assert peaks[0][0] > 0
    assert math.isfinite(peaks[0][0])
