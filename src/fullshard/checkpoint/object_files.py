"""Files of one checkpoint on object storage (see `objects` for the layout), and their upload in parts.

[Note: confirmed, or read back] A bit may flip between our memory and the store's disk, and a store that does
not check the bytes acknowledges them. So the MD5 of every part is compared with that which the store reports
for the bytes it received. S3 reports it as the ETag of each part. If S3 encrypts with keys (SSE-KMS, SSE-C),
the ETag is not an MD5: then its answer has to repeat the CRC-32, which S3 does only after comparing it. A
part whose report differs is sent again. Other stores report the MD5 of the whole object in their listing
(`md5Hash` of Google's, an ETag).

A report that differs every time, or is missing, does not count as damage, since some stores compute ETags in
their own way. Such an object is read back and compared, which doubles the traffic for these stores only.
"""

import base64
import errno
import functools
import hashlib
import io
import logging
import zlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.files import MANIFEST
from fullshard.spec.small_files import parse_json
from fullshard.system.object_store import (
    ANSWER_SECONDS,
    TRIES,
    AlteredBytesError,
    ObjectRangeReader,
    ObjectStore,
    backend_errors_as_os_errors,
)

# S3 accepts 10,000 parts, so a file of one rank may have up to 625 GiB.
PART_BYTES = 64 << 20
_READ_BYTES = 16 << 20

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class ObjectFiles:
    """Files of a checkpoint in an object store, or of one attempt to save it.

    url: prefix of the step
    attempt: id of the attempt; None for the committed checkpoint
    part_bytes: bytes sent per request; one part is in memory while a file is written
    answer_seconds: see `ObjectStore`
    key: see `CheckpointFiles`
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

    Keeps one part in memory. The last part is sent when the context ends, which can therefore raise OSError.
    """
    sending = (_S3Upload if store.is_s3 else _FsspecUpload)(store, url, part_bytes=part_bytes)
    ended = False
    try:
        yield cast(BinaryIO, sending)
        sending.complete_upload()
        ended = True
    finally:
        if not ended:
            with suppress(OSError):  # the earlier error is the one to show
                sending.abort_upload()


class _S3Upload:
    """Uploads an object with S3's own requests: one request if it is smaller than a part, else in parts."""

    def __init__(self, store: ObjectStore, url: str, *, part_bytes: int) -> None:
        self._store, self._url, self._part_bytes = store, url, part_bytes
        self._bucket, self._key = store.bucket_and_key(url)
        self._held = io.BytesIO()  # a file object, because aiohttp warns about large bytes objects
        self._id: str | None = None  # the store's id of a multipart upload
        self._parts: list[dict[str, Any]] = []
        self._digests: list[tuple[int, str]] = []  # bytes and MD5 of each part
        self._is_confirmed = self._is_answered = True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        left = memoryview(data).cast("B")
        count = left.nbytes
        while left.nbytes:
            left = left[self._held.write(left[: self._part_bytes - self._held.tell()]) :]
            if self._held.tell() == self._part_bytes:
                self._send_part()
        return count

    def complete_upload(self) -> None:
        if self._id is None:
            self._send_until_confirmed("put_object", {})
        else:
            if self._held.tell():
                self._send_part()
            # It may take S3 minutes to make one object of many parts.
            whole = {"UploadId": self._id, "MultipartUpload": {"Parts": self._parts}}
            self._call_s3("complete_multipart_upload", whole, moved_bytes=len(self._parts) << 20)
            self._id = None
        if not self._is_confirmed:
            _warn_objects_are_read_back(self._store.bucket_url)
            _read_back_and_compare(self._store, self._url, parts=self._digests)

    def abort_upload(self) -> None:
        # Skipped if the store has just timed out: it would time out again. A later save drops the parts.
        if self._id is not None and self._is_answered:
            self._call_s3("abort_multipart_upload", {"UploadId": self._id})

    def _send_part(self) -> None:
        if self._id is None:
            self._id = str(self._call_s3("create_multipart_upload", {})["UploadId"])
        number = len(self._parts) + 1
        answer = self._send_until_confirmed("upload_part", {"UploadId": self._id, "PartNumber": number})
        known = {name: one for name, one in answer.items() if name == "ETag" or name.startswith("Checksum")}
        known.pop("ChecksumType", None)
        self._parts.append({"PartNumber": number, **known})

    def _send_until_confirmed(self, request: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the bytes in memory, up to TRIES times, until S3 confirms them. Returns S3's last answer."""
        body, self._held = self._held, io.BytesIO()
        data = body.getbuffer()
        answer: Mapping[str, Any] | None = None
        refused: AlteredBytesError | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="md5") as thread:
            digested = thread.submit(lambda: hashlib.md5(data, usedforsecurity=False).hexdigest())
            for _ in range(TRIES):
                body.seek(0)
                try:
                    answer = self._call_s3(request, {**options, "Body": body}, moved_bytes=data.nbytes)
                except AlteredBytesError as error:
                    refused = error
                    continue
                if not self._is_confirmed or _is_receipt_proven(answer, data, md5=digested.result()):
                    break
            else:
                self._is_confirmed = False
            self._digests.append((data.nbytes, digested.result()))
        if answer is None:
            assert refused is not None, "tried at least once"
            raise refused
        return answer

    def _call_s3(self, method: str, options: Mapping[str, Any], *, moved_bytes: int = 0) -> Mapping[str, Any]:
        whole = {"Bucket": self._bucket, "Key": self._key, **options}
        try:
            return self._store.call_backend(
                self._url, "call_s3", method, options=whole, moved_bytes=moved_bytes
            )
        except OSError as error:
            self._is_answered = error.errno != errno.ETIMEDOUT
            raise


class _FsspecUpload:
    """Uploads an object to a store other than S3, by writing a file object of fsspec."""

    def __init__(self, store: ObjectStore, url: str, *, part_bytes: int) -> None:
        self._store, self._url = store, url
        self._file = store.open_for_writing(url, part_bytes=part_bytes)
        self._size_bytes = 0
        self._digest = hashlib.md5(usedforsecurity=False)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        part = memoryview(data).cast("B")
        self._digest.update(part)
        with backend_errors_as_os_errors(self._url):
            self._file.write(part)
        self._size_bytes += part.nbytes
        return part.nbytes

    def complete_upload(self) -> None:
        with backend_errors_as_os_errors(self._url):
            self._file.close()
        md5 = self._digest.hexdigest()
        if md5 not in self._store.possible_md5s_of_object(self._url):
            _warn_objects_are_read_back(self._store.bucket_url)
            _read_back_and_compare(self._store, self._url, parts=[(self._size_bytes, md5)])

    def abort_upload(self) -> None:
        """Discards the file object; else fsspec would finish the upload when the file object is deleted."""
        with suppress(OSError), backend_errors_as_os_errors(self._url):
            self._file.discard()
        if hasattr(self._file, "blocksize"):  # fsspec's own file, which sends nothing once closed
            self._file.closed = True


def _is_receipt_proven(answer: Mapping[str, Any], data: memoryview, *, md5: str) -> bool:
    """Returns whether S3's answer proves that it received `data`. See [Note: confirmed, or read back].

    md5: MD5 of `data` in hexadecimal digits
    """
    if str(answer.get("ETag")).strip('"') == md5:
        return True
    with_keys = "aws:kms" in str(answer.get("ServerSideEncryption")) or "SSECustomerAlgorithm" in answer
    crc32 = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    return with_keys and answer.get("ChecksumCRC32") == crc32


def _read_back_and_compare(store: ObjectStore, url: str, *, parts: Sequence[tuple[int, str]]) -> None:
    """Reads an object back. Raises AlteredBytesError if a part differs from its (size in bytes, MD5)."""
    begin = 0
    for size_bytes, md5 in parts:
        end, found = begin + size_bytes, hashlib.md5(usedforsecurity=False)
        for at in range(begin, end, _READ_BYTES):
            found.update(store.read_object(url, begin=at, end=min(at + _READ_BYTES, end)))
        if found.hexdigest() != md5:
            raise AlteredBytesError(f"bytes {begin} to {end} are others than were sent", place=url)
        begin = end


@functools.cache
def _warn_objects_are_read_back(bucket: str) -> None:
    """Logs a warning, once per bucket, that the store reports no checksum and objects are read back."""
    logger.warning(
        "%s reports no checksum that can be compared with what was sent: each object is read back", bucket
    )
