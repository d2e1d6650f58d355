"""Prefetches batches on a separate thread: the next steps' batches are made while a step computes."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from fullshard.data.batches import Batches
from fullshard.spec.plan import Plan

B = TypeVar("B", bound=Batches)


class PrefetchingBatches(Generic[B]):
    """Wraps `data` and makes the microbatches of the next `steps` steps in advance.

    The samples of a step are always those of `data`. If another step is requested than expected (after a
    resume, or past batches that are left out), prefetched batches are dropped and new ones are made. An error
    raised in `data` is raised in the step that requests the batch. At most `steps` steps' microbatches are
    kept, and no thread outlives `close`.
    """

    def __init__(self, data: B, *, steps: int) -> None:
        self.data, self._steps = data, steps
        self._executor: ThreadPoolExecutor | None = None
        self._made: deque[tuple[tuple[int, int, Plan], Future[list[Any]]]] = deque()

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of a step, see `Batches`."""
        if self._steps == 0:
            yield from self.data.microbatches(step, rank=rank, plan=plan)
            return
        wanted = (step, rank, plan)
        while self._made and self._made[0][0] != wanted:
            self._made.popleft()[1].cancel()
        # Submit the following steps before waiting for this one, so that the thread is never idle.
        after = self._made[-1][0][0] + 1 if self._made else step
        for following in range(after, step + 1 + self._steps):
            self._begin((following, rank, plan))
        _, made = self._made.popleft()
        yield from made.result()

    def close(self) -> None:
        """Stops the thread after it finishes its current step."""
        for _, future in self._made:
            future.cancel()
        self._made.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _begin(self, wanted: tuple[int, int, Plan]) -> None:
        step, rank, plan = wanted
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, thread_name_prefix="fullshard-data", initializer=_on_device, initargs=(_device(plan),)
            )
        future = self._executor.submit(lambda: list(self.data.microbatches(step, rank=rank, plan=plan)))
        self._made.append((wanted, future))


@contextmanager
def prefetch_batches(data: B, *, steps: int) -> Generator[PrefetchingBatches[B]]:
    """Prefetches `data` while the block runs."""
    ahead = PrefetchingBatches(data, steps=steps)
    try:
        yield ahead
    finally:
        ahead.close()


def _device(plan: Plan) -> int | None:
    return torch.cuda.current_device() if plan.device == "cuda" else None


def _on_device(index: int | None) -> None:
    """Sets the thread's CUDA device, to which pinned memory belongs. The default is the first device."""
    if index is not None:
        torch.cuda.set_device(index)
