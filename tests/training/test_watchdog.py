"""A run that hangs ends, and says which rank the others wait for."""

import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import TrainError
from fullshard.spec.settings.train_section import SLOW_PHASE_FACTOR, FaultToleranceSection
from fullshard.survival.diagnosis import (
    RankReport,
    UnresponsiveRank,
    diagnose_hang,
    host_and_namespace_id,
    process_state_letter,
)
from fullshard.survival.phase import Heartbeat, PhaseTracker, RunPhase
from fullshard.survival.watchdog import watch_for_hangs
from tests.training.hangs import hung

NOW = 1000.0

# Runs that hang, in processes of their own: (ranks, what is said, exit codes); None had to be killed

HARMS = {
    "sleeps_in_the_data": (
        2,
        r"rank 1 does not come to the collective that rank 0 waits in: in data of step 3 .*hangs.py",
        [8, 8],
    ),
    "stops_itself": (2, r"rank 1 does not answer, last heartbeat in .*: paused process", [8, None]),
    "holds_the_interpreter": (
        2,
        r"rank 1 does not answer, last heartbeat in .*: its process runs, but no Python in it does",
        [8, 1],
    ),
    "skips_a_collective": (
        3,
        r"rank 1 left out a collective that ranks 0, 2 wait in, or made one more: in forward of step 3",
        [8, 8, 8],
    ),
}


@pytest.mark.parametrize(
    "harm",
    [pytest.param(harm, marks=[pytest.mark.long] * (harm == "holds_the_interpreter")) for harm in HARMS],
)
def test_hang_is_ended_and_its_rank_is_named(harm: str, tmp_path: Path) -> None:
    ranks, said, codes = HARMS[harm]
    assert hung(harm, tmp_path, ranks=ranks, culprit=1) == codes
    for rank in (rank for rank, code in enumerate(codes) if code == TrainError.exit_code):
        assert re.match(said, (tmp_path / f"last-words-{rank}").read_text()), "all say the same"
    written = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(ranks))
    assert len(re.findall(f"^{said}", written, re.MULTILINE)) == 1, "one rank prints it"
    assert written.count("rank 0, every thread") == 1, "and those that are shown print their stacks"
    assert ("in sleeps_in_the_data" in written) == (harm == "sleeps_in_the_data"), "with the culprit's stack"
    assert ("in holds_the_interpreter" in written) == (harm == "holds_the_interpreter"), "even that of C"


@pytest.mark.long
def test_a_rank_alone_is_watched_too(tmp_path: Path) -> None:
    assert hung("sleeps_in_the_data", tmp_path, ranks=1, culprit=0) == [8]
    said = (tmp_path / "last-words-0").read_text()
    assert said.startswith("all ranks do not come to any collective: rank 0 in data of step 3")


def test_a_slow_phase_is_waited_for_on_all_ranks(tmp_path: Path) -> None:
    """Rank 1 saves for longer than the watchdog's time, which the others spend in a collective."""
    assert hung("saves_for_long", tmp_path, ranks=2, culprit=1) == [0, 0]


def test_a_stopped_or_disabled_watchdog_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with watch_for_hangs(PhaseTracker(), FaultToleranceSection(watchdog_timeout_seconds=0)):
        assert set(threading.enumerate()) == before
    with watch_for_hangs(PhaseTracker(), FaultToleranceSection(watchdog_timeout_seconds=100)):
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert "fullshard watchdog" in names
    assert set(threading.enumerate()) == before


def test_collectives_wait_for_longer_than_the_watchdog() -> None:
    for settings in ({}, {"watchdog_timeout_seconds": 1000.0}, {"watchdog_timeout_seconds": 0}):
        section = FaultToleranceSection(**settings)
        slow = section.watchdog_timeout_seconds * SLOW_PHASE_FACTOR
        assert section.process_group_timeout_seconds > slow
        assert section.process_group_timeout_seconds >= 600


# Who is to blame #
def seen(phase: RunPhase, step: int = 4, *, process: int = 1) -> Heartbeat:
    return Heartbeat(host_and_namespace_id(), process, step, str(phase), 31.0, 30.0, NOW - 1)


def report(phase: RunPhase, step: int = 4, *, waits: bool = True, collective: str = "") -> RankReport:
    return RankReport(seen(phase, step), waits, f"{phase}.py:1 in f", collective)


WAITING, BUSY = report(RunPhase.BACKWARD), report(RunPhase.DATA, waits=False)


@given(st.integers(1, 40), st.integers(0, 39))
def test_among_ranks_that_wait_the_one_that_does_not_is_named(others: int, at: int) -> None:
    reports = dict.fromkeys(range(others + 1), WAITING) | {at % (others + 1): BUSY}
    verdict = diagnose_hang(reports, {}, now=NOW)
    assert verdict.error.what.startswith(f"rank {at % (others + 1)} does not come to the collective that ")
    assert "in data of step 5 for 31 s, data.py:1 in f" in verdict.error.what
    assert at % (others + 1) in verdict.shown


EARLY, LATE = report(RunPhase.REDUCE), report(RunPhase.FORWARD, step=5)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([EARLY, LATE, EARLY], "rank 1 left out a collective that ranks 0, 2"),
        ([LATE, EARLY, LATE], "rank 1 left out a collective that ranks 0, 2"),
        ([LATE, EARLY], "rank 0 left out a collective that rank 1 waits"),
        ([report(RunPhase.FORWARD), EARLY], "rank 1 left out a collective that rank 0 waits"),
    ],
)
def test_the_minority_or_the_rank_that_is_further_ahead_left_something_out(
    reports: list[RankReport], said: str
) -> None:
    verdict = diagnose_hang(dict(enumerate(reports)), {}, now=NOW)
    assert verdict.error.what.startswith(said)


def test_flight_recorder_distinguishes_ranks_in_one_phase() -> None:
    reports = {
        rank: report(RunPhase.REDUCE, collective=f"gloo:all_reduce {17 - (rank == 2)}") for rank in range(4)
    }
    verdict = diagnose_hang(reports, {}, now=NOW)
    assert verdict.error.what.startswith("rank 2 left out a collective that ranks 0-1, 3 wait in")
    assert "rank 2: in reduce of step 5" in str(verdict.error.got)
    assert "last collective: gloo:all_reduce 16" in str(verdict.error.got)


def test_a_wait_has_the_name_that_it_has_in_a_trace() -> None:
    named = replace(WAITING, wait="wait for all-gather")
    got = str(diagnose_hang({0: named, 1: BUSY, 2: WAITING}, {}, now=NOW).error.got)
    assert "rank 0: in backward of step 5 for 31 s, wait for all-gather, backward.py:1" in got
    assert "rank 2: in backward of step 5 for 31 s, waits in a collective, backward.py:1" in got


def test_where_all_are_alike_none_is_blamed() -> None:
    verdict = diagnose_hang(dict.fromkeys(range(8), WAITING), {}, now=NOW)
    assert verdict.error.what.startswith("all ranks wait in the same collective")
    verdict = diagnose_hang(dict.fromkeys(range(8), BUSY), {}, now=NOW)
    assert verdict.error.what.startswith(
        "all ranks do not come to any collective: ranks 0-7 in data of step 5"
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("T", "paused process"),
        ("t", "paused process"),
        ("D", "waits in the kernel"),
        ("R", "native code holds the interpreter"),
        ("S", "native code holds the interpreter"),
        ("Z", "its process is gone"),
        ("", "its process is gone"),
        (None, "its host or the link to it is gone"),
    ],
)
def test_silent_rank_is_named_before_waiting_ranks(state: str | None, said: str) -> None:
    silent = {3: UnresponsiveRank(seen(RunPhase.FORWARD), state)}
    verdict = diagnose_hang({0: WAITING, 1: BUSY, 2: WAITING}, silent, now=NOW)
    assert verdict.error.what.startswith("rank 3 does not answer, last heartbeat in forward of step 5")
    assert said in verdict.error.what
    assert "rank 3: last heartbeat 1 s ago" in str(verdict.error.got)


def test_ranks_that_never_spoke_are_named_too() -> None:
    verdict = diagnose_hang(
        {0: WAITING}, {2: UnresponsiveRank(None, None), 1: UnresponsiveRank(None, None)}, now=NOW
    )
    assert verdict.error.what.startswith("rank 1 (and rank 2) does not answer, no heartbeat yet")


def test_report_of_thousands_of_ranks_is_short() -> None:
    reports = dict.fromkeys(range(4096), WAITING) | dict.fromkeys(range(100, 200), BUSY)
    verdict = diagnose_hang(reports, {}, now=NOW)
    assert len(str(verdict.error.got).splitlines()) == 2
    assert len(verdict.shown) <= 8


def test_process_state_is_known_on_the_same_host_only() -> None:
    own = Heartbeat(host_and_namespace_id(), os.getpid(), 1, "data", 1.0, 1.0, NOW)
    assert process_state_letter(own) in ("R", "S")
    assert process_state_letter(Heartbeat("elsewhere", os.getpid(), 1, "data", 1.0, 1.0, NOW)) is None
    assert process_state_letter(Heartbeat(host_and_namespace_id(), 2**22 + 1, 1, "data", 1.0, 1.0, NOW)) == ""
