"""A rank's own clock stands still while it waits for others or for a core, and counts collections apart."""

import gc
import threading

import pytest

from fullshard.distributed.ranges import OwnWorkClock, TimedRange, run_own_clock


class Hands:
    """The hands of a clock: the time, and that part of it in which the thread had no core."""

    def __init__(self) -> None:
        self.now = self.queued = 0

    def clock(self) -> OwnWorkClock:
        return OwnWorkClock(lambda: self.now, lambda: self.queued)


def test_busy_seconds_exclude_waiting_the_run_queue_and_collections():
    hands = Hands()
    with run_own_clock(hands.clock()) as clock:
        clock.enter_phase("forward")
        hands.now += 10
        with TimedRange("gather_sequence"), TimedRange("all_gather"):  # within it: counted once
            hands.now += 30
            hands.queued += 5
            assert clock.current_wait_name() == "wait for gather of sequences"
            clock.count_garbage_collection("start", {})
            hands.now += 2
            clock.count_garbage_collection("stop", {})
        assert clock.current_wait_name() == ""
        clock.count_garbage_collection("start", {})
        hands.now += 7
        clock.count_garbage_collection("stop", {})
        hands.now += 20
        hands.queued += 4
        clock.enter_phase("backward")
        hands.now += 3
        own = clock.take_seconds()
        assert own.by_phase == pytest.approx({"": 0, "forward": 26e-9, "backward": 3e-9})
        assert (own.waiting, own.garbage) == pytest.approx((25e-9, 9e-9))
        hands.now += 6
        again = clock.take_seconds()
        assert again.by_phase == pytest.approx({"backward": 6e-9})
        assert (again.waiting, again.garbage) == (0, 0)


def test_writing_within_an_agreement_is_work_of_the_rank():
    hands = Hands()
    with run_own_clock(hands.clock()) as clock, TimedRange("agreement"):
        hands.now += 10
        with TimedRange("write"):
            hands.now += 50
        hands.now += 20
    own = clock.take_seconds()
    assert own.waiting == pytest.approx(30e-9)
    assert own.by_phase[""] == pytest.approx(50e-9)


def test_collectives_of_other_threads_do_not_stop_the_clock():
    hands = Hands()

    def save_in_background() -> None:
        with TimedRange("agreement"):
            hands.now += 10

    with run_own_clock(hands.clock()) as clock:
        thread = threading.Thread(target=save_in_background)
        thread.start()
        thread.join()
    assert clock.take_seconds().waiting == 0


def test_the_hosts_clock_runs_and_sees_collections():
    with run_own_clock() as clock:
        gc.collect()
        own = clock.take_seconds()
    assert own.garbage > 0
    assert own.by_phase[""] >= 0
    assert clock.count_garbage_collection not in gc.callbacks
    assert TimedRange.clock is None
