"""The thread that updates the groups, and does the work that follows, during training.

[Note: the next forward need not wait] An update visits the groups in the order in which units are gathered.
Each gather waits for its own unit only, so that the end of an update, and its writes, run during the next
forward and backward. `wait_for_all_work` is called before the next update, and before other code reads the
state.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from fullshard.errors import OffloadError

Lacking = Callable[[], OffloadError]


class UpdateThread:
    """Runs submitted work in order on one thread, and stops after the first failure.

    settle: waits until all state is stored
    unusable: makes the error of all uses except a load, while values are missing or from two states; or None
    frozen_unusable: makes this error for frozen parameters; or None
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self.unusable: Lacking | None = None
        self.frozen_unusable: Lacking | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-update")
        self._running: list[Future[None]] = []
        self._pending: dict[int, threading.Event] = {}
        self._error: BaseException | None = None

    def submit_update(self, act: Callable[[], None], *, units: Iterable[int]) -> None:
        """Submits an update, `act`, which calls `mark_unit_updated` for each of `units`."""
        self._pending = {unit: threading.Event() for unit in units}
        self.submit(act)

    def submit(self, act: Callable[[], None]) -> None:
        """Runs `act` on the thread after all work submitted before, unless that has failed."""
        future = self.thread.submit(lambda: None if self._error else act())
        future.add_done_callback(self._record_failed_work)
        self._running.append(future)

    def mark_unit_updated(self, unit: int) -> None:
        self._pending[unit].set()

    def wait_for_unit_update(self, unit: int) -> None:
        """Waits until the unit is updated. Raises OffloadError if work failed or the state is unusable."""
        if (event := self._pending.get(unit)) is not None:
            event.wait()
        self._raise_if_unusable()

    def wait_for_all_work(self, *, to_load: bool = False) -> None:
        """Waits until no work is running.

        Raises the error of failed work, in this call and every later call; unless `to_load`, also `unusable`
        and `frozen_unusable`.
        """
        running, self._running = self._running, []
        for future in running:
            future.exception()  # waits; `_record_failed_work` has recorded the error
        if self._error is None:
            try:
                self._settle()
            except OffloadError as error:
                self._error = error
        self._raise_if_unusable(to_load=to_load)

    def _record_failed_work(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._error = error
            for event in self._pending.values():
                event.set()

    def _raise_if_unusable(self, *, to_load: bool = False) -> None:
        error = self._error
        lacking = None if to_load else self.unusable or self.frozen_unusable
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
            why=f"{why} the state in memory belongs to no single step".strip(),
            fix=f"{fix}start again with --resume, which resumes from the newest complete state",
        ) from error


def half_loaded_error(what: str = "the optimizer's state was") -> OffloadError:
    """Returns the error for state that an interrupted load has set in part."""
    return OffloadError(
        f"{what} loaded in part.",
        why="an error ended the load, so the state is a mixture of two",
        fix="load a complete state, or resume from a checkpoint",
    )


def not_loaded_error() -> OffloadError:
    """Returns the error for a model that has no values yet."""
    return OffloadError(
        "the model has no values yet.",
        why='fullshard.shard(..., init="none") leaves them to a load',
        fix="fullshard.load_pretrained(model, directory, plan=plan), or a checkpoint, before",
    )
