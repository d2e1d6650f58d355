"""Prefetches microbatches on a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch

from fullshard.data.batches import MicrobatchSource
from fullshard.spec.plan import Plan


class MicrobatchPrefetcher:
    """Makes the microbatches of the next `steps` steps of `data` on a thread, while a step computes.

    If another step is requested than expected (after a resume, or past batches that are left out), prefetched
    batches are dropped and new ones are made. An error raised in `data` is raised in the step that requests
    the batch. Use as a context manager.
    """

    def __init__(self, data: MicrobatchSource, *, steps: int) -> None:
        self._data, self._steps = data, steps
        self._executor: ThreadPoolExecutor | None = None
        self._made: deque[tuple[tuple[int, int, Plan], Future[list[Any]]]] = deque()

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
        if self._steps == 0:
            yield from self._data.microbatches(step, rank=rank, plan=plan)
            return
        wanted = (step, rank, plan)
        while self._made and self._made[0][0] != wanted:
            self._made.popleft()[1].cancel()
        # Submit the following steps before waiting for this one, so that the thread is never idle.
        after = self._made[-1][0][0] + 1 if self._made else step
        executor = self._get_or_start_executor(plan)
        for following in range(after, step + 1 + self._steps):
            future = executor.submit(self._make_microbatches, following, rank=rank, plan=plan)
            self._made.append(((following, rank, plan), future))
        yield from self._made.popleft()[1].result()

    def _make_microbatches(self, step: int, *, rank: int, plan: Plan) -> list[Any]:
        return list(self._data.microbatches(step, rank=rank, plan=plan))

    def _get_or_start_executor(self, plan: Plan) -> ThreadPoolExecutor:
        if self._executor is None and plan.device == "cuda":
            # Pinned memory belongs to the thread's CUDA device, which is the first one by default.
            device = (torch.cuda.current_device(),)
            self._executor = ThreadPoolExecutor(1, "fullshard-data", torch.cuda.set_device, device)
        elif self._executor is None:
            self._executor = ThreadPoolExecutor(1, "fullshard-data")
        return self._executor
