"""Mutated inputs by the thousand: each either works or ends with a FullshardError.

Every input is made from (seed, target, number), so a violation can be made again. Inputs are read in child
processes, many in each, under a limit of memory; a signal ends an input that takes too long.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import FrameType

from fullshard.errors import FullshardError
from tests.fuzz.targets import TARGETS, prepare

MEMORY_BYTES = 2 << 30
EACH_CHILD = 250  # inputs
MARKER = "marker"  # what an attack creates


class TooLongError(BaseException):
    """Raised into an input that takes more processor time than it may."""


@dataclass(frozen=True)
class Violation:
    """An input that neither worked nor ended with a FullshardError."""

    target: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.target} {self.number}: {self.what}"


@dataclass
class Outcome:
    """worked, refused: how many inputs did. slowest: the most processor seconds of one. peak_bytes: the most
    memory that a child had resident beyond what it began with."""

    worked: int = 0
    refused: int = 0
    slowest: float = 0.0
    peak_bytes: int = 0
    violations: tuple[Violation, ...] = ()


def fuzz(
    *,
    inputs: int,
    seed: int,
    targets: Sequence[str],
    limit_seconds: float,
    keep: Path | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Outcome:
    """Tries `inputs` inputs, of each target as many.

    keep: where inputs that are violations are put.
    say: gets each violation as it is found, and the progress.
    """
    total = Outcome()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        seeds = Path(name, "seeds")
        prepare(seeds)
        work = [(target, number) for number in range(-(-inputs // len(targets))) for target in targets]
        while work:
            batch, work = work[:EACH_CHILD], work[EACH_CHILD:]
            known = len(total.violations)
            done = _in_child(batch, Path(name), seed=seed, limit_seconds=limit_seconds, total=total)
            if done < len(batch):  # the child died of the next one
                target, number = batch[done]
                total.violations += (Violation(target, number, "the process died"),)
                work = batch[done + 1 :] + work
            for one in total.violations[known:]:
                say(str(one))
                if keep is not None:
                    keep_input(one, seeds, keep, seed=seed)
            say(f"{total.worked + total.refused + len(total.violations)} inputs")
    return total


def _in_child(
    batch: Sequence[tuple[str, int]], root: Path, *, seed: int, limit_seconds: float, total: Outcome
) -> int:
    """Returns how many inputs of the batch the child came through."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_read_all, args=(theirs, batch, root, seed, limit_seconds))
    child.start()
    theirs.close()
    done = 0
    while True:
        try:
            refused, what, seconds, peak = ours.recv()
        except EOFError:
            break
        target, number = batch[done]
        done += 1
        total.refused += refused
        total.worked += not refused and what is None
        total.slowest, total.peak_bytes = max(total.slowest, seconds), max(total.peak_bytes, peak)
        if what is not None:
            total.violations += (Violation(target, number, what),)
    child.join()
    return done


def _read_all(
    answers: Connection, batch: Sequence[tuple[str, int]], root: Path, seed: int, limit_seconds: float
) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    before = _resident()
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _too_long)
    for target, number in batch:
        directory = root / "input"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        make_input(target, number, root / "seeds", directory, seed=seed)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limit_seconds)
        refused, what = _read(target, directory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if what is None and (directory / MARKER).exists():
            what = "an attack ran"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        answers.send((refused, what, time.process_time() - began, peak))


def _read(target: str, directory: Path) -> tuple[bool, str | None]:
    """(whether it was refused as it may be, what was wrong with how it ended)."""
    try:
        TARGETS[target].read(directory)
    except FullshardError:
        return True, None
    except (Exception, TooLongError) as error:  # noqa: BLE001
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "fullshard" in one.filename]
        place = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return False, f"{type(error).__name__}{place}: {' '.join(str(error).split())[:200]}"
    return False, None


def make_input(target: str, number: int, seeds: Path, directory: Path, *, seed: int) -> None:
    """Writes the input `number` of a target into `directory`."""
    TARGETS[target].make(seeds, directory, Random(f"{seed} {target} {number}"))


def keep_input(violation: Violation, seeds: Path, keep: Path, *, seed: int) -> None:
    directory = keep / f"{violation.target.replace(' ', '-')}-{violation.number}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    make_input(violation.target, violation.number, seeds, directory, seed=seed)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLongError("too much processor time")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _data() -> int:
    """Bytes of private memory that are counted against RLIMIT_DATA."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
