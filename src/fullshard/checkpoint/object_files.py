"""Files of one checkpoint on object storage. See `objects` for the layout."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.files import MANIFEST
from fullshard.checkpoint.object_store import ANSWER_SECONDS, Listing, RangeReader, Store
from fullshard.checkpoint.object_upload import upload
from fullshard.spec.small_files import parse_json

# S3 accepts 10,000 parts, so a file of one rank may have up to 625 GiB.
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class ObjectFiles:
    """Files of a checkpoint below the prefix `url`, or of one attempt to save it.

    url: prefix of the step
    attempt: name of the attempt; None for the committed checkpoint
    part_bytes: bytes sent per request; one such part is in memory while a file is written
    answer_seconds: see `Store`
    key: see `Files`
    """

    url: str
    attempt: str | None = None
    part_bytes: int = PART_BYTES
    answer_seconds: float = ANSWER_SECONDS
    key: KeyFile | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url if self.attempt is None else f"{self.url}/{self.attempt}"

    def sizes(self) -> dict[str, int]:
        if self.attempt is not None:
            return sizes_of(self.store.listing(self._prefix))
        own = sizes_of(self.store.listing(self.url))
        if MANIFEST not in own or self._prefix == self.url:
            return own
        return {**sizes_of(self.store.listing(self._prefix)), MANIFEST: own[MANIFEST]}

    def read(self, name: str) -> bytes:
        return self.store.get(self._at(name))

    @contextmanager
    def open(self, name: str) -> Generator[BinaryIO]:
        yield cast(BinaryIO, RangeReader(self.store, self._at(name)))

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        return upload(self.store, self._at(name), part_bytes=self.part_bytes)

    @property
    def store(self) -> Store:
        return Store(self.url, self.answer_seconds)

    def _at(self, name: str) -> str:
        committed = name == MANIFEST and self.attempt is None
        return f"{self.url if committed else self._prefix}/{name}"

    @cached_property
    def _prefix(self) -> str:
        """Prefix of the files: that of the attempt that the manifest names.

        It is `url` itself if the files were copied from a file system and lie beside the manifest.
        """
        attempt = self.attempt or attempt_of(self.read(MANIFEST))
        below = self.attempt is not None or attempt in self.store.listing(self.url).prefixes
        return f"{self.url}/{attempt}" if below else self.url


def attempt_of(manifest: bytes) -> str | None:
    """Returns the attempt that a manifest names, or None if the files lie beside it.

    Returns "unknown" for a damaged manifest: no such attempt exists, and reading the manifest reports the
    damage.
    """
    try:
        data: Any = parse_json(manifest)
        attempt: Any = data.get("attempt")
    except (ValueError, AttributeError):
        return "unknown"
    return attempt if isinstance(attempt, str | None) else "unknown"


def sizes_of(listing: Listing) -> dict[str, int]:
    """Returns the size in bytes of each object of a listing, by name."""
    return {name: one.size_bytes for name, one in listing.objects.items()}
