"""A save, a load, a generation or a line of the log, at whose first call, second call, … something happens.

Each sweep ends when there is no such call, and returns at how many it happened: at each, or one in `stride`.
After each, what had been acknowledged is there, nothing of others is gone, and the same act succeeds when
nothing happens.
"""

import errno
import itertools
import logging
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.location import latest_checkpoint
from fullshard.checkpoint.save import save
from fullshard.errors import FullshardError
from fullshard.observe.run_log import MetricsLog
from fullshard.observe.step_metrics import StepMetrics
from fullshard.offload.drive import DriveSystemCalls
from fullshard.offload.generations import discard_rank_directory
from tests.checkpoint.states import State, assert_same, numbers
from tests.faults.calls import KILL, KILLED, Fault, faults, in_child, watched
from tests.faults.crowd import left_by_saves, litter
from tests.faults.lost_writes import Killed, Recorder, build, iterate_crashes
from tests.offload.writer import opened, put, usable
from tests.ranks.pool import warm

REFUSED = "refused"
LOG = "a start of the log"
LOST = errno.EIO  # the errno after which the bytes of a file count as lost, and an older checkpoint serves


def outcome(root: Path, fault: Fault, act: Callable[[], Any]) -> Any:
    """Returns what `act` returns, to whose calls `fault` happens; REFUSED for a FullshardError; KILLED."""

    def acted() -> Any:
        with watched(root, fault):
            try:
                return act()
            except FullshardError:
                return REFUSED

    if fault.how != KILL:
        return acted()
    came = in_child(acted)
    fault.hit = "a call" if came == KILLED else ""
    return came


def state_of(step: int) -> State:
    return State(step, numbers(step), {"tokens": step * 100})


def saved_at(directory: Path, step: int, *, background: bool = False, keep: int = 2) -> bool:
    if not background:
        save(state_of(step), directory, keep=keep)
        return True
    with BackgroundSaver(directory, keep=keep) as saver:
        saver.save(state_of(step))
        saver.wait()
        (ended,) = saver.outcomes()
    if ended.error is not None:
        raise ended.error
    return True


def loaded_step(directory: Path) -> int:
    """Compares the bits of the newest checkpoint, and returns its step; 0 if there is none."""
    state = state_of(0)
    if not load(state, directory, missing_ok=True):
        return 0
    assert_same(state.held, numbers(state.step))
    assert state.noted == {"tokens": state.step * 100}
    return state.step


def sweep_of_saves(root: Path, how: int | str, stride: int = 1, *, background: bool = False) -> int:
    """Saves that remove an older checkpoint, in a directory that others use too."""
    directory, newest, count = root / "checkpoints", 2, 0
    litter(directory)
    for step in (1, 2):
        saved_at(directory, step)
    for fault in faults(how, stride):
        step, count = newest + 1, count + 1
        came = outcome(root, fault, partial(saved_at, directory, step, background=background))
        found = loaded_step(directory)
        assert found == step or (came is not True and found == newest), f"{fault.hit}: {came}, step {found}"
        # What is removed, or is to be, is read after the commit alone.
        assert came is not REFUSED or f"/step-{newest - 1:08d}/" not in fault.hit, fault.hit
        newest = step + 1
        saved_at(directory, newest)
        left = [".lock", *(f"step-{one:08d}" for one in (found, newest))]
        assert left_by_saves(directory) == left, fault.hit
    return count - 1


def sweep_of_first_saves(root: Path, how: int | str, stride: int = 1) -> int:
    """Saves into a directory that is not there, whose parent is not there."""
    for count, fault in enumerate(faults(how, stride)):
        directory = root / f"{count}" / "run" / "checkpoints"
        came = outcome(root, fault, partial(saved_at, directory, 1))
        assert loaded_step(directory) == 1 or came is not True, fault.hit
        saved_at(directory, 1)
        assert loaded_step(directory) == 1
        assert sorted(one.name for one in directory.iterdir()) == [".lock", "step-00000001"], fault.hit
        shutil.rmtree(root / f"{count}")
    return count


def sweep_of_loads(root: Path, how: int | str, stride: int = 1) -> int:
    directory, count = root / "checkpoints", 0
    for step in (1, 2):
        saved_at(directory, step)
    litter(directory)
    for count, fault in enumerate(faults(how, stride)):  # noqa: B007
        came = outcome(root, fault, partial(loaded_step, directory))
        assert came in (2, REFUSED, KILLED) or (came == 1 and fault.how == LOST), f"{fault.hit}: {came}"
        for aside in directory.glob(".bad-*"):
            assert fault.how == LOST, fault.hit
            aside.rename(directory / aside.name[5:18])
        assert loaded_step(directory) == 2
    return count


def sweep_of_reads(root: Path, how: int | str, stride: int = 1) -> int:
    """A search for the newest, and a verification."""
    directory, count = root / "checkpoints", 0
    for step in (1, 2):
        saved_at(directory, step)

    def read() -> int:
        return len(str(latest_checkpoint(directory))) + len(list(iterate_damage(directory / "step-00000002")))

    for count, fault in enumerate(faults(how, stride)):  # noqa: B007
        outcome(root, fault, read)
        assert loaded_step(directory) == 2
    return count


def as_now() -> DriveSystemCalls:
    """The calls as they are at this moment, which may be watched."""
    return DriveSystemCalls(os.open, os.preadv, os.pwritev, os.fdatasync, os.fsync, os.posix_fallocate)


def sweep_of_generations(root: Path, how: int | str, stride: int = 1) -> int:
    """A start on what is on the drive, and a generation more."""
    directory, newest, count = root / "run" / "rank-00003", 0, 0

    def kept(step: int) -> int:
        with opened(directory, system=as_now()) as generations:
            return put(generations, step).step

    for fault in faults(how, stride):
        count += 1
        came = outcome(root, fault, partial(kept, newest + 1))
        steps = usable(directory)
        assert steps[:1] == [newest + 1] or (came != newest + 1 and steps[:1] == ([newest] if newest else []))
        newest = kept(newest + 2)
        (directory / "notes.txt").touch()
        assert usable(directory)[0] == newest
    assert sorted(one.name for one in directory.iterdir() if one.name.startswith(".")) == []
    assert (directory / "notes.txt").exists()
    return count - 1


def sweep_of_discards(root: Path, how: int | str, stride: int = 1) -> int:
    directory, count = root / "run" / "rank-00003", 0
    for count, fault in enumerate(faults(how, stride)):  # noqa: B007
        with opened(directory) as generations:
            put(generations, 1)
        (directory / "notes.txt").touch()
        outcome(root, fault, partial(discard_rank_directory, directory))
        discard_rank_directory(directory)
        assert [one.name for one in directory.iterdir()] == ["notes.txt"], fault.hit
    return count


def _logged(directory: Path, *, after: int, to: int) -> int:
    log = MetricsLog(directory, after_step=after)
    try:
        for step in range(after + 1, to + 1):
            log.write_step(StepMetrics(step, 1.0, 1.0, 1.0, 1, 1, 1.0))
    finally:
        log.close()
    return to


def _steps_in(directory: Path) -> list[int]:
    lines = (directory / "metrics.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [int(line.split(b",")[0].rpartition(b":")[2]) for line in lines]


def sweep_of_logs(root: Path, how: int | str, stride: int = 1) -> int:
    """A resume whose log has lines of later steps and half a line."""
    directory, count = root / "run", 0
    for count, fault in enumerate(faults(how, stride)):  # noqa: B007
        shutil.rmtree(directory, ignore_errors=True)
        _logged(directory, after=0, to=5)
        with (directory / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 6, "lo')
        outcome(root, fault, partial(_logged, directory, after=3, to=6))
        _logged(directory, after=3, to=6)
        assert _steps_in(directory) == [1, 2, 3, 4, 5, 6], fault.hit
    return count


def sweep_of_full_logs(root: Path) -> int:
    """Writes a log whose file cannot grow beyond a limit of bytes."""
    directory, (soft, hard) = root / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    _logged(directory, after=0, to=3)
    whole = (directory / "metrics.jsonl").stat().st_size
    for most in range(whole):
        shutil.rmtree(directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            came = outcome(root, Fault(0, LOST), partial(_logged, directory, after=0, to=3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert came == REFUSED
        written = most // (whole // 3)
        _logged(directory, after=written, to=3)
        assert _steps_in(directory) == [1, 2, 3]
    return whole


SWEEPS: dict[str, Callable[..., int]] = {
    "a save that removes an older one": sweep_of_saves,
    "a save in the background": partial(sweep_of_saves, background=True),
    "the first save": sweep_of_first_saves,
    "a load": sweep_of_loads,
    "a list, a verification": sweep_of_reads,
    "a start on a drive, a generation": sweep_of_generations,
    "a removal from a drive": sweep_of_discards,
    LOG: sweep_of_logs,
}


def lost_writes_of_saves(root: Path, samples: int) -> int:
    """Power cuts at every moment of three saves, the last of which removes the first one."""
    place, directory = root / "disk", root / "disk" / "run" / "checkpoints"
    place.mkdir()
    recorder, moments = Recorder(place), [0]
    for step in (1, 2, 3):
        with watched(place, recorder):
            saved_at(directory, step)
        moments.append(len(recorder.record))

    def check(disk: Path, moment: int) -> None:
        newest = sum(one <= moment for one in moments) - 1
        assert loaded_step(disk / "run" / "checkpoints") in (newest, newest + 1)

    return _built(root, recorder, check, samples=samples)


def _first_save(place: Path) -> None:
    saved_at(place / "run" / "checkpoints", 1)


def _first_generation(place: Path) -> None:
    with opened(place / "run" / "rank-00003", system=as_now()) as generations:
        put(generations, 2 if generations.list_complete_generations() else 1)


def lost_writes_after_kills(root: Path, samples: int) -> int:
    """A power cut right after an act that follows on one which was killed at each of its calls in turn.

    At every third, if there are no samples.
    """
    return sum(
        _after_kills(root / act.__name__, act, samples=samples) for act in (_first_save, _first_generation)
    )


def _after_kills(root: Path, act: Callable[[Path], None], *, samples: int) -> int:
    count = 0
    for after in itertools.count(0, 1 if samples else 3):
        place = root / f"{after}"
        place.mkdir(parents=True)
        recorder = Recorder(place, kill_after=after)
        with suppress(Killed, FullshardError), watched(place, recorder):
            act(place)
            return count
        recorder.kill_after = None
        with watched(place, recorder):
            act(place)

        def check(disk: Path, moment: int, after: int = after) -> None:
            first = act is _first_save
            steps = [loaded_step(disk / "run/checkpoints")] if first else usable(disk / "run/rank-00003")
            assert steps not in ([], [0]), f"killed after {after} of {moment}"

        count += _built(root, recorder, check, begin=len(recorder.record), samples=samples)
    return count


def lost_writes_of_generations(root: Path, samples: int) -> int:
    place = root / "disk"
    place.mkdir()
    recorder, moments = Recorder(place), [0]
    with watched(place, recorder), opened(place / "run" / "rank-00003", system=as_now()) as generations:
        for step in (1, 2, 3):
            put(generations, step)
            moments.append(len(recorder.record))

    def check(disk: Path, moment: int) -> None:
        newest = sum(one <= moment for one in moments) - 1
        assert [*usable(disk / "run" / "rank-00003"), 0][0] in (newest, newest + 1)

    return _built(root, recorder, check, samples=samples)


def _built(
    root: Path, recorder: Recorder, check: Callable[[Path, int], None], *, begin: int = 0, **chosen: Any
) -> int:
    count = 0
    for moment, changes in iterate_crashes(recorder, begin=begin, rng=random.Random(0), **chosen):
        build(root / "built", recorder.tree, changes)
        check(root / "built", moment)
        shutil.rmtree(root / "built")
        count += 1
    return count


LOST_WRITES = {
    "saves": lost_writes_of_saves,
    "generations": lost_writes_of_generations,
    "acts after a killed one": lost_writes_after_kills,
}


def apart(function: Callable[..., int], *arguments: Any) -> int:
    """`function(root, …)` in a process with one thread, which may fork; `root` is a directory in memory."""
    with ProcessPoolExecutor(1, mp_context=warm()) as process:
        return process.submit(_in_memory, function, *arguments).result()


def _in_memory(function: Callable[..., int], *arguments: Any) -> int:
    logging.disable()
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as root:
        return function(Path(root), *arguments)
