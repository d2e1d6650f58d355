"""Interfaces between the training loop and its data, and prefetching of microbatches on a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.distributed.host import make_device_thread
from fullshard.spec.plan import Plan


class MicrobatchSource(Protocol):
    """A source of microbatches that keeps no position: a step's samples depend only on its number."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the `plan.accumulation` microbatches of data rank `rank` for step `step` (from 0).

        rank: from 0 to `plan.world_size` - 1; ranks that share sequences have the same data rank
        plan: the run's plan, in which ranks that share sequences count as one (`Plan.for_data`)

        Each microbatch is passed to the loss, or if ranks share sequences, this rank's part of it. For a
        given step, all data ranks together must yield the same samples whatever their number, so that a run
        resumed on another number of ranks continues exactly.
        """
        ...


class RowSource(MicrobatchSource, Protocol):
    """A source whose steps can begin at any row, so that runs continue exactly with another global batch.

    takes_any_row: whether `microbatches_at_row` may be called
    row_order: text that differs if any row does, by other content, seed, packing …; None if unknown
    validation_digest: text that differs if the validation data that the user names do; None if none are named
    """

    @property
    def takes_any_row(self) -> bool: ...

    @property
    def row_order(self) -> str | None: ...

    @property
    def validation_digest(self) -> str | None: ...

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of the step whose first row is `row`, see `microbatches`."""
        ...


class TrainingData(MicrobatchSource, Protocol):
    """The data of a run, as `build_data` returns it: training microbatches and held-out batches.

    training_sequences: number of training sequences, of which an epoch has each once; None if unknown
    vocabulary: vocabulary size, which is larger than each token of the data; None if unknown
    validation_tokens: number of held-out tokens; 0 for no validation
    """

    @property
    def training_sequences(self) -> int | None: ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def validation_tokens(self) -> int: ...

    def validation(self, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields a data rank's held-out batches, shaped as in `microbatches`, equally many for each rank."""
        ...

    def describe(self) -> str:
        """Returns a description of the data: one line, which others may follow, such as warnings."""
        ...


def microbatch_sample_numbers(microbatch_number: int, *, data_rank: int, plan: Plan) -> NDArray[np.int64]:
    """Returns the numbers of the samples in a data rank's microbatch of this number, from 0.

    All data ranks together take consecutive sample numbers, microbatch after microbatch.
    """
    first = (microbatch_number * plan.data_parallel_degree + data_rank) * plan.microbatch
    return np.arange(first, first + plan.microbatch, dtype=np.int64)


class _StepRequest(NamedTuple):
    """Request for a step's microbatches: `first` is its number if `stride` is 1, else its first row."""

    first: int
    stride: int
    rank: int
    plan: Plan


class MicrobatchPrefetcher(AbstractContextManager["MicrobatchPrefetcher"]):
    """Makes the microbatches of the next `steps` steps of `data` on a thread, while a step computes.

    If another step is requested than the next (after a resume, or past batches that are left out), prefetched
    batches before it are dropped. An error raised in `data` is raised in the step that requests the batch.
    With `steps` = 0, there is no thread. Use as a context manager.
    """

    def __init__(self, data: MicrobatchSource, *, steps: int) -> None:
        self._data, self._steps = data, steps
        self._executor: ThreadPoolExecutor | None = None
        self._made: deque[tuple[_StepRequest, Future[list[Any]]]] = deque()

    def __exit__(self, *_: object) -> None:
        """Stops the thread after it finishes its current step."""
        self._made.clear()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of a data rank for a step, see `MicrobatchSource.microbatches`."""
        return self._take_and_prefetch_next(_StepRequest(step, 1, rank, plan))

    def microbatches_at_row(self, row: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        """Yields the microbatches of the step that begins at `row`, see `RowSource`."""
        return self._take_and_prefetch_next(_StepRequest(row, plan.run.train.global_batch, rank, plan))

    def __getattr__(self, name: str) -> Any:  # the members of a RowSource
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def _take_and_prefetch_next(self, wanted: _StepRequest) -> Iterator[Any]:
        """Yields the microbatches of `wanted`, after submitting the following steps to the thread."""
        if self._steps == 0:
            yield from self._make_microbatches(wanted)
            return
        while self._made and self._made[0][0] != wanted:
            self._made.popleft()[1].cancel()
        # Submit the following steps before waiting for this one, so that the thread is never idle.
        executor = self._executor = self._executor or make_device_thread("fullshard-data")
        for ahead in range(len(self._made), 1 + self._steps):
            following = wanted._replace(first=wanted.first + ahead * wanted.stride)
            self._made.append((following, executor.submit(self._make_microbatches, following)))
        yield from self._made.popleft()[1].result()

    def _make_microbatches(self, request: _StepRequest) -> list[Any]:
        if request.stride == 1:
            return list(self._data.microbatches(request.first, rank=request.rank, plan=request.plan))
        at_row = cast(RowSource, self._data).microbatches_at_row
        return list(at_row(request.first, rank=request.rank, plan=request.plan))
