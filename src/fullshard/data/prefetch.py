"""Prefetches microbatches on a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, cast

import torch

from fullshard.data.batches import MicrobatchSource, RowSource
from fullshard.spec.plan import Plan


class _Place(NamedTuple):
    """Microbatches of one step: of step `first` if `stride` is 1, else of the step whose first row it is."""

    first: int
    stride: int
    rank: int
    plan: Plan


class MicrobatchPrefetcher:
    """Makes the microbatches of the next `steps` steps of `data` on a thread, while a step computes.

    If another step is requested than expected (after a resume, or past batches that are left out), prefetched
    batches are dropped and new ones are made. An error raised in `data` is raised in the step that requests
    the batch. Use as a context manager.
    """

    def __init__(self, data: MicrobatchSource, *, steps: int) -> None:
        self._data, self._steps = data, steps
        self._executor: ThreadPoolExecutor | None = None
        self._made: deque[tuple[_Place, Future[list[Any]]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread after it finishes its current step."""
        self._made.clear()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of a data rank for a step, see `MicrobatchSource.microbatches`."""
        return self._prefetch(_Place(step, 1, rank, plan))

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of the step that begins at `row`, see `RowSource`."""
        return self._prefetch(_Place(row, plan.run.train.global_batch, rank, plan))

    @property
    def takes_any_row(self) -> bool:
        return bool(getattr(self._data, "takes_any_row", False))

    @property
    def row_order(self) -> str | None:
        return getattr(self._data, "row_order", None)

    def _prefetch(self, wanted: "_Place") -> Iterator[Any]:
        if self._steps == 0:
            yield from self._make_microbatches(wanted)
            return
        while self._made and self._made[0][0] != wanted:
            self._made.popleft()[1].cancel()
        # Submit the following steps before waiting for this one, so that the thread is never idle.
        executor = self._get_or_start_executor(wanted.plan)
        for ahead in range(len(self._made), 1 + self._steps):
            following = wanted._replace(first=wanted.first + ahead * wanted.stride)
            self._made.append((following, executor.submit(self._make_microbatches, following)))
        yield from self._made.popleft()[1].result()

    def _make_microbatches(self, place: "_Place") -> list[Any]:
        if place.stride == 1:
            return list(self._data.microbatches(place.first, rank=place.rank, plan=place.plan))
        at_row = cast(RowSource, self._data).microbatches_at_row
        return list(at_row(place.first, rank=place.rank, plan=place.plan))

    def _get_or_start_executor(self, plan: Plan) -> ThreadPoolExecutor:
        if self._executor is None and plan.device == "cuda":
            # Pinned memory belongs to the thread's CUDA device, which is the first one by default.
            device = (torch.cuda.current_device(),)
            self._executor = ThreadPoolExecutor(1, "fullshard-data", torch.cuda.set_device, device)
        elif self._executor is None:
            self._executor = ThreadPoolExecutor(1, "fullshard-data")
        return self._executor
