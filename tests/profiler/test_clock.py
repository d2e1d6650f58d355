"""Steps are timed by marks that nobody waits for; the matmul peak is every rank's, measured at once."""

import math

import pytest
import torch

from fullshard.profiler.clock import (
    HostTimeline,
    StepClock,
    find_matmul_peak,
    measure_matmul_peak,
    sustained_rate,
)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Stream:
    """A device that works behind the host: marks carry the time at which the work before them is done."""

    def __init__(self) -> None:
        self.done_at, self.now, self.waits = 0.0, 0.0, 0

    def work(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.now) + seconds

    def mark(self) -> float:
        return max(self.done_at, self.now)

    def passed(self, mark: float) -> bool:
        return mark <= self.now

    def seconds(self, start: float, end: float) -> float:
        self.waits += end > self.now
        self.now = max(self.now, end)
        return end - start


def test_a_step_lasts_from_start_to_stop_and_what_comes_between_is_no_steps_time():
    now = Clock()
    clock = StepClock(HostTimeline(now), now=now)
    for seconds in (1.0, 2.0):
        clock.start()
        with clock.waiting_for_data():
            now.seconds += 0.25
        now.seconds += seconds
        clock.stop()
        now.seconds += 100.0  # saving, validating
    assert [(step.seconds, step.data_seconds) for step in clock.read()] == [(1.25, 0.25), (2.25, 0.25)]
    assert clock.read() == []


def test_steps_of_a_device_are_timed_without_waiting_for_it():
    stream = Stream()
    clock = StepClock(stream)
    for seconds in (3.0, 4.0, 5.0):
        clock.start()
        stream.work(seconds)
        clock.stop()
    assert clock.finished() == []
    stream.now = 7.0
    assert [step.seconds for step in clock.finished()] == [3.0, 4.0]
    assert stream.waits == 0
    assert [step.seconds for step in clock.read()] == [5.0]
    assert stream.waits == 1


def test_data_that_fails_to_come_was_still_waited_for():
    now = Clock()
    clock = StepClock(HostTimeline(now), now=now)

    def read() -> None:
        with clock.waiting_for_data():
            now.seconds += 0.5
            raise OSError("gone")

    clock.start()
    with pytest.raises(OSError, match="gone"):
        read()
    clock.stop()
    assert clock.read()[0].data_seconds == 0.5


@pytest.mark.parametrize("seconds", [1e-5, 0.01, 3.0])
def test_a_sustained_rate_is_calls_over_time(seconds: float):
    now = Clock()

    def work() -> None:
        now.seconds += seconds

    rate = sustained_rate(work, seconds=0.5, on=HostTimeline(now))
    assert rate == pytest.approx(1 / seconds)
    assert now.seconds <= 0.5 + 5 * seconds + 1e-9


def test_measuring_leaves_the_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert measure_matmul_peak(torch.device("cpu"), torch.float32, seconds=0.02) > 0
    assert torch.equal(torch.get_rng_state(), before)


def peak_on_this_rank() -> tuple[float, str, str]:
    peak = find_matmul_peak(torch.device("cpu"), "fp32")
    return peak.flops_per_second, peak.source, peak.device


def test_all_ranks_hold_themselves_against_the_same_measured_peak(ranks):
    peaks = ranks(2).run(peak_on_this_rank)
    assert peaks[0] == peaks[1]
    assert peaks[0][1:] == ("measured", "cpu, 1 thread")
    assert peaks[0][0] > 0
    assert math.isfinite(peaks[0][0])
