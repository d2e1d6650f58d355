"""Files of one checkpoint on object storage (see `objects` for the layout), and their upload.

The store's library sends an object in parts, with the checksums that the store compares.
"""

import errno
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from fullshard.checkpoint.files import MANIFEST
from fullshard.system.object_store import ANSWER_SECONDS, ObjectRangeReader, ObjectStore
from fullshard.system.small_files import parse_json

# S3 accepts 10,000 parts, so a file of one rank may have up to 625 GiB.
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class ObjectFiles:
    """Files of a checkpoint in an object store, or of one attempt to save it.

    url: prefix of the step
    attempt: id of the attempt; None for the committed checkpoint
    part_bytes: bytes sent per request; a part and a copy of it are in memory while a file is written
    answer_seconds: see `ObjectStore`
    """

    url: str
    attempt: str | None = None
    part_bytes: int = PART_BYTES
    answer_seconds: float = ANSWER_SECONDS

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url if self.attempt is None else f"{self.url}/{self.attempt}"

    def file_sizes_bytes(self) -> dict[str, int]:
        if self.attempt is not None:
            return self.store.list_prefix(self._attempt_prefix_url).object_sizes_bytes
        own = self.store.list_prefix(self.url).object_sizes_bytes
        if MANIFEST not in own or self._attempt_prefix_url == self.url:
            return own
        below = self.store.list_prefix(self._attempt_prefix_url).object_sizes_bytes
        return {**below, MANIFEST: own[MANIFEST]}

    def read_file(self, name: str) -> bytes:
        return self.store.read_object(self._file_url(name))

    @contextmanager
    def open_file(self, name: str) -> Generator[BinaryIO]:
        yield cast(BinaryIO, ObjectRangeReader(self.store, self._file_url(name)))

    def create_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        return open_upload(self.store, self._file_url(name), part_bytes=self.part_bytes)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url, self.answer_seconds)

    def _file_url(self, name: str) -> str:
        committed = name == MANIFEST and self.attempt is None
        return f"{self.url if committed else self._attempt_prefix_url}/{name}"

    @cached_property
    def _attempt_prefix_url(self) -> str:
        """URL of the prefix of the attempt's files: `url` itself if they were copied from a file system."""
        attempt = self.attempt or attempt_id_in_manifest(self.read_file(MANIFEST))
        below = self.attempt is not None or attempt in self.store.list_prefix(self.url).prefixes
        return f"{self.url}/{attempt}" if below else self.url


def attempt_id_in_manifest(manifest: bytes) -> str | None:
    """Returns the attempt id in the bytes of a manifest, or None if the files are beside the manifest.

    Returns "unknown", which is not the id of any attempt, for a damaged manifest.
    """
    try:
        attempt: Any = parse_json(manifest).get("attempt")
    except (ValueError, AttributeError):
        return "unknown"
    return attempt if isinstance(attempt, str | None) else "unknown"


@contextmanager
def open_upload(store: ObjectStore, url: str, *, part_bytes: int) -> Generator[BinaryIO]:
    """Opens an object for writing. The object exists only after the context ends without error.

    The last part is sent when the context ends, which can therefore raise OSError.
    """
    sending = _Upload(store, url, part_bytes=part_bytes)
    ended = False
    try:
        yield cast(BinaryIO, sending)
        sending.complete()
        ended = True
    finally:
        if not ended:
            sending.abort()


class _Upload:
    """An object that is written through a file object of fsspec, with a deadline for each call."""

    def __init__(self, store: ObjectStore, url: str, *, part_bytes: int) -> None:
        self._store, self._url, self._part_bytes = store, url, part_bytes
        self._file = store.open_for_writing(url, part_bytes=part_bytes)
        self._size_bytes = 0
        self._is_answered = True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        part = memoryview(data).cast("B")
        self._call(lambda: self._file.write(part), moved_bytes=self._part_bytes + part.nbytes)
        self._size_bytes += part.nbytes
        return part.nbytes

    def complete(self) -> None:
        # It may take S3 minutes to make one object of many parts.
        parts = self._size_bytes // self._part_bytes
        self._call(self._file.close, moved_bytes=self._part_bytes + (parts << 20))

    def abort(self) -> None:
        """Discards the file object; else fsspec would finish the upload when the file object is deleted.

        Sends nothing if the store has just timed out: it would time out again. A later save drops the parts.
        """
        if self._is_answered:
            with suppress(OSError):  # the earlier error is the one to show
                self._call(self._file.discard)
        if hasattr(self._file, "blocksize"):  # fsspec's own file, which sends nothing once closed
            self._file.closed = True

    def _call(self, act: Callable[[], object], *, moved_bytes: int = 0) -> None:
        try:
            self._store.call_within_deadline(self._url, act, moved_bytes=moved_bytes)
        except OSError as error:
            self._is_answered = error.errno != errno.ETIMEDOUT
            raise
