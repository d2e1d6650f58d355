"""Batches made ahead, by a thread of their own: while a step computes, those of the next are made."""

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
    """`data`, whose microbatches of the next `steps` steps are made before they are asked for.

    What a step trains on is what `data` says: another step than the one that was expected (after a resume, or
    past batches that are left out) drops what was made, and is made anew. What raises in `data` raises in the
    step that asks for it. At most `steps` steps' microbatches are kept, and no thread outlives `close`.
    """

    def __init__(self, data: B, *, steps: int) -> None:
        self.data, self._steps = data, steps
        self._executor: ThreadPoolExecutor | None = None
        self._made: deque[tuple[tuple[int, int, Plan], Future[list[Any]]]] = deque()

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """See `Batches`."""
        if self._steps == 0:
            yield from self.data.microbatches(step, rank=rank, plan=plan)
            return
        wanted = (step, rank, plan)
        while self._made and self._made[0][0] != wanted:
            self._made.popleft()[1].cancel()
        # Before the first is waited for, so that the thread goes from one to the next.
        after = self._made[-1][0][0] + 1 if self._made else step
        for following in range(after, step + 1 + self._steps):
            self._begin((following, rank, plan))
        _, made = self._made.popleft()
        yield from made.result()

    def close(self) -> None:
        """Ends the thread, when it has made what it is at."""
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
    """`data` made ahead while the block runs."""
    ahead = PrefetchingBatches(data, steps=steps)
    try:
        yield ahead
    finally:
        ahead.close()


def _device(plan: Plan) -> int | None:
    return torch.cuda.current_device() if plan.device == "cuda" else None


def _on_device(index: int | None) -> None:
    """Pinned memory is of the thread's device, which is the first unless it is told."""
    if index is not None:
        torch.cuda.set_device(index)
