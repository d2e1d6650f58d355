"""What goes on beside training: the update of the groups, and what comes after it.

[Note: the next forward need not wait] An update goes through the groups in the order in which units are
gathered. Each gather waits for its own unit and no others, so that the tail of an update, and its writes, go
on beside the next forward and backward. `settle` is where all of it must be through: before
the next update, and before anybody else looks.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from fullshard.errors import OffloadError

Lacking = Callable[[], OffloadError]


class UpdateThread:
    """One thread, which does one thing after the other; after one that failed, nothing.

    What failed is raised as it is, and an OffloadError with what it means for the run.
    `settle`: what must be done besides until all is where it stays. `hurried`: while somebody waits for a
    unit, or (None) for all, nothing that comes before it is put off. `lacking`: the error for all but a load,
    as long as there are no values, or those of two states; `base_lacking`: of what is frozen.
    """

    def __init__(
        self, settle: Callable[[], None], *, hurried: Callable[[int | None], AbstractContextManager[None]]
    ) -> None:
        self._settle, self._hurried = settle, hurried
        self.unusable: Lacking | None = None
        self.base_unusable: Lacking | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-update")
        self._running: list[Future[None]] = []
        self._pending: dict[int, threading.Event] = {}
        self._error: BaseException | None = None

    def begin(self, act: Callable[[], None], *, units: Iterable[int]) -> None:
        """Has `act` called, which says of each of `units` when it is `done`."""
        self._pending = {unit: threading.Event() for unit in units}
        self.submit(act)

    def submit(self, act: Callable[[], None]) -> None:
        """Has `act` called, after all that is under way."""
        future = self.thread.submit(lambda: None if self._error else act())
        future.add_done_callback(self._ended)
        self._running.append(future)

    def unit_done(self, unit: int) -> None:
        """The unit is updated."""
        self._pending[unit].set()

    def wait_for(self, unit: int) -> None:
        """Returns when it is updated. Raises OffloadError where it never will be."""
        event = self._pending.get(unit)
        if event is not None and not event.is_set():
            with self._hurried(unit):
                event.wait()
        self._raise()

    def settle(self, *, to_load: bool = False) -> None:
        """Returns when nothing goes on. Raises OffloadError for what failed, now and ever after, and for what
        is `lacking`, unless it is `to_load` it."""
        running, self._running = self._running, []
        with self._hurried(None):
            for future in running:
                future.exception()  # waits; what it is `_ended` has kept
        if self._error is None:
            try:
                self._settle()
            except OffloadError as error:
                self._error = error
        self._raise(to_load=to_load)

    def _ended(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._error = error
            for event in self._pending.values():
                event.set()

    def _raise(self, *, to_load: bool = False) -> None:
        error = self._error
        lacking = None if to_load else self.unusable or self.base_unusable
        if error is None and lacking is not None:
            raise lacking()
        if error is None:
            return
        if not isinstance(error, OffloadError):
            raise error
        got, why = (f" {part}" if part else "" for part in (error.got, error.why and f"{error.why}, and"))
        fix = f"{error.fix}; then " if error.fix else ""
        raise type(error)(
            "the optimizer's state could not be updated.",
            got=f"{error.what.removesuffix('.')}:{got}" if got else error.what,
            why=f"{why} what is left of it in memory belongs to no step".strip(),
            fix=f"{fix}start again with --resume: it resumes from the newest whole state",
        ) from error


def half_loaded() -> OffloadError:
    """A load has begun, and is not at its end."""
    return OffloadError(
        "the optimizer's state was loaded in part.",
        why="the load was broken off by an error, and what is there now is of two states",
        fix="load a whole state, or start again from a checkpoint",
    )


def base_half_loaded() -> OffloadError:
    """The same, of what is frozen."""
    return OffloadError(
        "the frozen parameters were loaded in part.",
        why="the load was broken off by an error, and what is there now is of two states",
        fix="load the weights or a checkpoint that has them again",
    )


def not_loaded() -> OffloadError:
    """Nothing has given any values yet."""
    return OffloadError(
        "the model has no values yet.",
        why='fullshard.shard(..., values="unset") leaves them to a load',
        fix="fullshard.load_pretrained(model, directory, plan=plan), or a checkpoint, before",
    )
