"""DCP's file storage, whose failures wait until all ranks can hear of them.

DCP sends a rank's exception to the coordinator by pickling it, and hangs where that fails; and it loses the
cause, which is where torch keeps the operating system's word. So a failure to write or to read is kept here,
and raised by `finish`. See [Note: failures are agreed on].
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.checkpoint.agreement import Attempt, distributed

T = TypeVar("T")


class Writer(FileSystemWriter):
    """Writes this rank's shards into one file of the directory `path`."""

    def __init__(self, path: Path) -> None:
        # One thread: DCP swallows the errors of others (pytorch#191391). No sync: DCP's comes before its
        # flush, so whoever calls `write` flushes the files afterwards.
        super().__init__(path, thread_count=1, sync_files=False, overwrite=False)
        self.attempt = Attempt()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        with self.attempt:
            written = super().write_data(plan, planner).value()
        return _done(written)


class Reader(FileSystemReader):
    """Reads from the checkpoint `path`; its metadata is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.attempt = Attempt()
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # signature: DCP's StorageReader
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self.attempt:
            super().read_data(plan, planner)
        return _done(None)


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes this rank's part of `tensors` into the directory `path`. Collective, where ranks are.

    May raise on one rank alone: call it within `everyone`.
    """
    writer = Writer(path)
    with _single_process_is_meant():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not distributed())
    writer.attempt.finish()


def opened(path: Path) -> Reader:
    """A reader of the checkpoint `path`, whose metadata it has read. Raises what that raises."""
    reader = Reader(path)
    reader.read_metadata()
    return reader


def read(tensors: Mapping[str, Tensor], reader: Reader, *, alone: bool = False) -> None:
    """Fills this rank's part of `tensors`. Collective where ranks are, unless `alone`.

    May raise on one rank alone: call it within `everyone`.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _single_process_is_meant():
        dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=alone or not distributed())
    reader.attempt.finish()


@contextmanager
def _single_process_is_meant() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
