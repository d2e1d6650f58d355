"""Runs work that may fail on any rank, so that the other ranks do not wait for a failed rank forever.

[Note: failures are agreed on] A rank that raises between two collectives leaves the others waiting in the
second. So anything that can fail on one rank alone runs inside `run_on_all_ranks` or `run_on_rank_zero`. The
failure is caught, sent to all ranks as text (an exception need not survive pickling), and then raised on all
of them.
"""

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.rounds import all_gather_pickled, all_reduce_largest
from fullshard.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FullshardError,
    LaunchError,
    OffloadError,
)
from fullshard.system.files import checkpoint_error_from_os_error
from fullshard.torch_private.groups import find_default_store, has_backend

_LONGEST_PAUSE_SECONDS = 2.0
_CHECKS_PER_SECOND = 30_000  # by all ranks together: half of what a store can answer

T = TypeVar("T")
Group: TypeAlias = dist.ProcessGroup | None


class ErrorCapture(AbstractContextManager["ErrorCapture"]):
    """Context manager that catches the exception of its block. See [Note: failures are agreed on]."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None  # interrupts are not caught
        return self.error is not None

    def raise_captured(self) -> None:
        """Raises the exception that the block raised, if any."""
        if self.error is not None:
            raise self.error


def is_distributed() -> bool:
    """Returns True if the default process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Returns this process's global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def all_gather_object(value: T, *, group: Group = None) -> list[T]:
    """Returns a list of every rank's `value`, in rank order. Collective over `group` (None: all ranks)."""
    if not is_distributed():
        return [value]
    with TimedRange("agreement"):
        if group is not None or has_backend("cpu"):
            return all_gather_pickled(value, group=group)
        values: list[Any] = [None] * world_size()
        dist.all_gather_object(values, value)
    return values


def largest_over_ranks(own: Sequence[float], *, group: Group = None) -> list[float]:
    """Returns the largest of the lists of all ranks, as Python compares lists of equal length. Collective."""
    if not is_distributed():
        return [*own]
    with TimedRange("agreement"):
        if group is not None or has_backend("cpu"):
            return all_reduce_largest(own, group=group)
    return max(all_gather_object([*own]))


def all_ranks_have(value: bool, *, group: Group = None) -> bool:
    """Returns whether `value` is true on every rank. Collective over `group` (None: all ranks).

    The host waits for the device only if the default group is of NCCL alone.
    """
    if not is_distributed() or has_backend("cpu") or group is not None:
        return largest_over_ranks([not value], group=group) == [False]
    least = torch.tensor([value], dtype=torch.uint8, device="cuda")
    with TimedRange("agreement"):
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return bool(least.item())


@contextmanager
def raise_on_all_ranks(doing: str, *, group: Group = None) -> Generator[None]:
    """Context manager for work of every rank: raises CheckpointError on all ranks if one failed. Collective.

    The error is that of the lowest failed rank, which it names unless all ranks failed alike. It is a
    DamagedCheckpointError only if every failed rank raised that. Other classes become a CheckpointError that
    begins with `doing`, a description of the work. Its cause is this rank's own error, or else the
    OffloadError of the named rank.
    """
    attempt = ErrorCapture()
    with attempt:
        yield
    if all_ranks_have(attempt.error is None, group=group):
        return
    gathered = all_gather_object(_make_rank_failure(attempt, doing), group=group)
    named = _choose_failure_to_report([one for one in gathered if one is not None])
    raise named.error from attempt.error or named.offload


def run_on_all_ranks(act: Callable[[], T], *, doing: str, group: Group = None) -> T:
    """Runs `act()` on every rank and returns this rank's result. See `raise_on_all_ranks` for failures."""
    with raise_on_all_ranks(doing, group=group):
        return act()


def run_on_rank_zero(act: Callable[[], T], *, doing: str, group: Group = None) -> T:
    """Runs `act()` on rank 0, and returns its result, or raises CheckpointError, on all ranks. Collective."""
    attempt, results, content = ErrorCapture(), list[T](), b""
    if rank() == 0:
        with attempt:
            results.append(act())
            content = pickle.dumps(results) if is_distributed() else b""  # may fail, on rank 0 alone
    answer: list[Any] = [(content, _make_rank_failure(attempt, doing))]
    if is_distributed():
        with TimedRange("agreement"):
            dist.broadcast_object_list(answer, src=0, group=group)
    content, failure = answer[0]
    if failure is not None:
        raise failure.error from attempt.error
    return (results or pickle.loads(content))[0]


def call_on_rank_zero(
    act: Callable[[], T], *, meanwhile: Callable[[Callable[[], None]], object] = lambda alive: None
) -> T:
    """Calls `act()`, which may take hours, on rank 0, and returns its result on all ranks. Collective.

    All ranks raise a FullshardError that `act` raises, and a LaunchError if it calls `sys.exit`. If it raises
    another error or its result cannot be pickled, rank 0 raises that error, and the others a LaunchError.
    Without a process group, returns `act()`.

    meanwhile: called on the other ranks, with a function that it must call regularly, and which raises an
        error once `act` has ended. Errors of `meanwhile` are ignored, but not interrupts.

    >>> fs.call_on_rank_zero(lambda: 3)  # such as a plan, which need not be made on each rank
    3
    """
    if (store := find_default_store()) is None:
        return act()
    attempt, results, content = ErrorCapture(), list[T](), b""
    # The others wait in the store: a collective would time out. All ranks count the same calls.
    key, due = f"fullshard/call/{store.add(f'fullshard/calls/{rank()}', 1)}", 0.0

    def raise_if_done() -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + _LONGEST_PAUSE_SECONDS
            if store.check([key]):
                raise LaunchError("rank 0 has ended its work.")

    if rank() == 0:
        with attempt:
            try:
                results.append(act())
            except SystemExit as left:
                raise LaunchError.for_early_exit(left) from left
            content = pickle.dumps(results)
        store.set(key, "done")
    else:
        with ErrorCapture():
            meanwhile(raise_if_done)
    # Python runs no handler of a signal within `store.wait`, and torch warns when its time is over.
    pause = 0.01 + world_size() / _CHECKS_PER_SECOND
    while not store.check([key]):  # raises if the store has gone
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST_PAUSE_SECONDS)
    answer: list[Any] = [(content, attempt.error and _pickle_error(attempt.error))]
    dist.broadcast_object_list(answer, src=0)
    attempt.raise_captured()
    content, error = answer[0]
    if error is not None:
        raise pickle.loads(error)
    return (results or pickle.loads(content))[0]


def _pickle_error(error: Exception) -> bytes:
    """Returns `error` pickled; a LaunchError of its texts if that fails, or it is not a FullshardError."""
    if not isinstance(error, FullshardError):
        error = LaunchError(
            "rank 0 failed in work that it does for all ranks.", got=f"{type(error).__name__}: {error}"
        )
    with ErrorCapture():
        return pickle.dumps(error)
    got = error.got and str(error.got)
    return pickle.dumps(LaunchError(error.what, got=got, why=error.why, fix=error.fix))


def run_raising_checkpoint_error(act: Callable[[], T], *, doing: str) -> T:
    """Runs `act()` on this rank only, without any collective. Raises CheckpointError for any exception."""
    attempt = ErrorCapture()
    with attempt:
        return act()
    failure = _make_rank_failure(attempt, doing)
    assert failure is not None, "the block returns unless it raises"
    raise failure.error from attempt.error


class _RankFailure(NamedTuple):
    """A CheckpointError that can be pickled, the rank that it occurred on, and the OffloadError behind it."""

    rank: int
    error: CheckpointError
    offload: OffloadError | None


def _choose_failure_to_report(failures: Sequence[_RankFailure]) -> _RankFailure:
    """Returns the lowest rank's failure, damage last. Its text names the rank, unless all failed alike."""
    # Errors other than damage come first: only damage is cured by another checkpoint.
    first = min(failures, key=lambda one: (isinstance(one.error, DamagedCheckpointError), one.rank))
    if len(failures) == world_size() and len({(type(one.error), str(one.error)) for one in failures}) == 1:
        return first
    error, what = first.error, f"rank {first.rank}: {first.error.what}"
    return first._replace(error=type(error)(what, got=error.got, why=error.why, fix=error.fix))


def _make_rank_failure(attempt: ErrorCapture, doing: str) -> _RankFailure | None:
    """Returns `attempt`'s exception as it is sent to other ranks; None if it has none."""
    error = attempt.error
    if error is None:
        return None
    offload = error if isinstance(error, OffloadError) else None
    if not isinstance(error, CheckpointError):
        error = _as_checkpoint_error(error, doing)
    kind = DamagedCheckpointError if isinstance(error, DamagedCheckpointError) else CheckpointError
    got = None if error.got is None else str(error.got)
    return _RankFailure(rank(), kind(error.what, got=got, why=error.why, fix=error.fix), offload)


def _as_checkpoint_error(error: Exception, doing: str) -> CheckpointError:
    what = f"{doing} failed."
    if isinstance(error, OSError):
        return checkpoint_error_from_os_error(what, error)
    if isinstance(error, FullshardError):
        return CheckpointError(what, got=error.what_and_got, why=error.why, fix=error.fix)
    lines = str(error).strip().splitlines()
    return CheckpointError(what, got=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
