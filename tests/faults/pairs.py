"""Two faults in one attempt to train: the next start loses nothing, and trains with the same losses."""

import errno
import itertools
import os
import random
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint.location import LocalLocation
from tests.faults.calls import WRITES, Call, watched
from tests.faults.course import (
    Course,
    Mode,
    assert_it_resumes,
    last_acknowledged,
    lines,
    note_own,
    train_course,
)
from tests.faults.crowd import litter
from tests.faults.damage import ACTS, FILES, damage
from tests.ranks import RankFailed

FULL, KILLED, CLOCK, PAUSE, CUT, DAMAGE = (
    "a full disk",
    "a killed rank",
    "a clock that jumps back",
    "a paused rank",
    "a cut link",
    "a damaged newest file",
)
PAIRS = list(itertools.combinations((FULL, KILLED, CLOCK, PAUSE, CUT, DAMAGE), 2))
VICTIM = 1  # of kills and pauses
UNTIL = 12
DAY_SECONDS = 86400.0


def cut_link() -> None:
    """Ends all connections of this process with other ranks."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptor = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as connection:
                if (
                    connection.family != socket.AF_UNIX and connection.getpeername()
                ):  # else none, or it listens
                    connection.shutdown(socket.SHUT_RDWR)


def _prepare(course: Course, fault: str, *, strikes: threading.Event, stack: ExitStack) -> None:
    """Prepares this rank for a fault that begins with `strikes`, unless `stack` has been closed before."""
    victim, act = dist.get_rank() == VICTIM, None
    if fault == FULL:

        def refuse(call: Call) -> Any:
            if strikes.is_set() and call.name in (*WRITES, "mkdir", "fsync"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(call.path))
            return call.make()

        stack.enter_context(watched(course.directory, refuse))
    elif fault == CLOCK:
        real = time.time
        time.time = lambda: real() - DAY_SECONDS * strikes.is_set()
        stack.callback(setattr, time, "time", real)
    elif fault == CUT and victim:
        act = cut_link
    elif fault == KILLED and victim:
        act = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    elif fault == PAUSE and not victim:
        act = lambda: _pause(int(lines(course.record, f"process-{VICTIM}")[-1]))  # noqa: E731
    if act is not None:
        over = threading.Event()
        stack.callback(over.set)
        threading.Thread(target=lambda: strikes.wait() and not over.is_set() and act(), daemon=True).start()


def _pause(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process, signal.SIGCONT)


def troubled(course: Course, faults: tuple[str, str], delays: tuple[float, float]) -> None:
    """Trains, with faults so long after two saves. A rank whose training raises notes the error, and ends."""
    note_own(course, f"process-{dist.get_rank()}", f"{os.getpid()}")

    def strike(delay: float, strikes: threading.Event) -> None:
        while len(lines(course.record, "acknowledged")) < 2:
            time.sleep(0.001)
        time.sleep(delay)
        strikes.set()

    if CUT in faults:  # gloo's thread may wait for its timeout where its connection was cut, but not closed
        threading.Thread(target=_end_after_the_other, args=(course, dist.get_rank()), daemon=True).start()
    with ExitStack() as stack:
        for fault, delay in zip(faults, delays, strict=True):
            strikes = threading.Event()
            threading.Thread(target=strike, args=(delay, strikes), daemon=True).start()
            _prepare(course, fault, strikes=strikes, stack=stack)
        try:
            train_course(course)
        except Exception as error:  # noqa: BLE001
            note_own(course, f"ended-{dist.get_rank()}", f"{type(error).__name__}")
            os._exit(1)  # as a rank that a launcher has started: its connections end with it
    note_own(course, f"ended-{dist.get_rank()}", "finished")


def _end_after_the_other(course: Course, rank: int) -> None:
    """Ends this rank, as a launcher does, three seconds after the other has ended, unless it has ended."""
    while not lines(course.record, f"ended-{1 - rank}"):
        time.sleep(0.05)
    time.sleep(3)
    if not lines(course.record, f"ended-{rank}"):  # else its process may run another course by now
        note_own(course, f"ended-{rank}", "ended with the other")
        os._exit(1)


def two_faults(ranks: Callable, place: Path, *, faults: tuple[str, str], mode: Mode, seed: int) -> str:
    """Returns how the attempt ended."""
    rng, record, checkpoints = random.Random(f"{faults} {seed}"), place / "record", place / "checkpoints"
    record.mkdir()
    litter(checkpoints)
    course = Course(checkpoints, record, mode=mode, until=UNTIL, largest_disk=True)
    with suppress(RankFailed, RuntimeError):
        ranks(2).run(troubled, course, faults, (rng.uniform(0, 0.4), rng.uniform(0, 0.4)))
    ended = [one for rank in range(2) for one in lines(record, f"ended-{rank}")]
    by_itself = [bool(lines(record, f"ended-{rank}")) for rank in range(2)]
    assert by_itself[1 - VICTIM], f"the other rank did not end by itself: {ended}"
    assert by_itself[VICTIM] or KILLED in faults, f"the victim did not end by itself: {ended}"
    assert set(ended) <= {"finished", "CheckpointError", "RuntimeError", "ended with the other"}, ended
    least = last_acknowledged(record)
    if DAMAGE in faults:
        newest, older, *_ = (checkpoints / f.name for _, f in LocalLocation(checkpoints).list_checkpoints())
        if damage(newest, older, act=rng.choice(ACTS), files=rng.choice(FILES), rng=rng):
            least = min(least, int(older.name.removeprefix("step-")))
    assert_it_resumes(ranks, course, least=least)
    return "finished" if set(ended) == {"finished"} else "stopped"
