"""Requests to an object store through fsspec. Failures are raised as OSError.

    s3://bucket/run        pip install "fullshard[s3]"
    gs://…, abfs://…       whatever fsspec knows, once its package is installed

Each backend reads its own settings of credentials and endpoint; S3 those of the AWS command line
(`AWS_PROFILE`, `AWS_ENDPOINT_URL`, …). A request whose connection breaks is tried up to five times.

[Note: an answer in time] A store may accept a connection and never answer, or never read a request's body.
Backends do not limit the wait: s3fs repeats botocore's tries, which makes 25 tries of 15 s per request, and
sending a body has no timeout at all. So every request has a deadline here, which covers all its tries.
"""

import errno
import functools
import importlib
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fullshard.errors import MissingExtraError, SpecError
from fullshard.quantities import format_seconds
from fullshard.system.disk import ExplainedOSError

ANSWER_SECONDS = 60.0
"""Deadline of a request, with all its tries."""
_BYTES_PER_SECOND = 1 << 20  # a slower network than this is taken for one that does not answer

_REMOTE = getattr(errno, "EREMOTEIO", errno.EPROTO)
# Exceptions of backends that are not OSErrors, by module; only loaded modules are looked at.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
    ("httpx", "HTTPError"),
)
_UNREACHED = {
    "ConnectionError",
    "HTTPClientError",
    "ClientConnectionError",
    "TimeoutError",
    "RequestTimeout",
    "TransportError",
}
_URL_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+")
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
# Their URLs begin with a bucket; those of other stores (hdfs:///data) may have no host.
_BUCKETED = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "r2", "b2"}
_ALTERED = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_CHANGED_AT = ("LastModified", "last_modified", "updated", "mtime", "created")

logger = logging.getLogger("fullshard")


def is_remote_url(path: str) -> bool:
    """Returns whether `path` is a URL, except a `file://` URL."""
    return "://" in path and not path.startswith("file://")


def without_secrets(text: str) -> str:
    """Returns `text` with its URLs shortened: without users, passwords, and queries, which may sign a URL."""

    def shorten(url: re.Match[str]) -> str:
        protocol, _, rest = url[0].partition("://")
        host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
        is_container = protocol in ("abfs", "abfss")  # abfs://container@account
        return f"{protocol}://{host if is_container else host.rpartition('@')[2]}{slash}{path}"

    return _URL_IN_TEXT.sub(shorten, text)


@dataclass(frozen=True)
class ObjectSizeAndTime:
    """An object in a listing: its size, and the time of its last change by the store's clock, if reported."""

    size_bytes: int
    changed: datetime | None


@dataclass(frozen=True)
class PrefixListing:
    """Content directly below a prefix: objects by name, and the names of further prefixes."""

    objects: Mapping[str, ObjectSizeAndTime]
    prefixes: tuple[str, ...]

    @property
    def object_sizes_bytes(self) -> dict[str, int]:
        return {name: one.size_bytes for name, one in self.objects.items()}


@dataclass(frozen=True)
class ObjectStore:
    """Requests to one object store. Every method may raise OSError.

    url: a prefix in the bucket
    answer_seconds: deadline of a request with all its tries; a request gets one second more per MiB
    """

    url: str
    answer_seconds: float = ANSWER_SECONDS

    def check_url_and_package(self) -> None:
        """Raises MissingExtraError if the store's package is missing, SpecError for an unusable URL."""
        protocol, _, rest = self.url.partition("://")
        if not rest.strip("/") or (protocol in _BUCKETED and rest.startswith("/")):
            raise SpecError(f"{self.url} names no bucket.", fix=f"{protocol}://bucket/run")
        assert self._file_system is not None, "fsspec gives a file system, or raises"

    def list_prefix(self, url: str) -> PrefixListing:
        """Returns the current listing of a prefix, without a cache. A missing prefix has an empty listing."""
        path = self._fsspec_path(url)
        try:
            entries = self.call_backend(url, "ls", path, options={"detail": True, "refresh": True})
        except FileNotFoundError:
            return PrefixListing({}, ())
        prefix = f"{path.strip('/')}/"
        by_path = {str(entry["name"]).strip("/"): entry for entry in entries}
        below = {at.removeprefix(prefix): by_path[at] for at in sorted(by_path) if at.startswith(prefix)}
        objects = {name: _parse_size_and_time(one) for name, one in below.items() if one["type"] == "file"}
        return PrefixListing(objects, tuple(name for name in below if name not in objects))

    def read_object(self, url: str, *, begin: int | None = None, end: int | None = None) -> bytes:
        """Returns the bytes of an object, or those from `begin` to `end`."""
        path, options = self._fsspec_path(url), {"start": begin, "end": end}
        moved_bytes = (end or 0) - (begin or 0)
        return self.call_backend(url, "cat_file", path, options=options, moved_bytes=moved_bytes)

    def object_size_bytes(self, url: str) -> int:
        options = {} if url.startswith("http") else {"refresh": True}  # web servers have no listings
        return int(self.call_backend(url, "info", self._fsspec_path(url), options=options)["size"])

    def put_new_object(self, url: str, *, data: bytes) -> None:
        """Creates a small object in one request.

        Raises FileExistsError if the object exists (fsspec checks this beforehand for a store without
        if-none-match).
        """
        path, options = self._fsspec_path(url), {"mode": "create"}
        self.call_backend(url, "pipe_file", path, data, options=options, moved_bytes=len(data))

    def open_for_writing(self, url: str, *, part_bytes: int) -> Any:
        """Returns fsspec's file object for writing an object. The caller closes or discards it."""
        with backend_errors_as_os_errors(url):
            return self._file_system.open(self._fsspec_path(url), "wb", block_size=part_bytes)

    def remove_objects(self, urls: Sequence[str]) -> None:
        if urls:
            self.call_backend(self.url, "rm", [self._fsspec_path(url) for url in urls])

    def abort_interrupted_uploads(self, url: str) -> None:
        """Removes interrupted uploads below `url`, whose invisible parts S3 keeps and charges for."""
        if not hasattr(self._file_system, "call_s3"):
            return
        bucket, prefix, _ = self._file_system.split_path(self._fsspec_path(url))
        options = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        listed = self.call_backend(url, "call_s3", "list_multipart_uploads", options=options)
        for one in listed.get("Uploads", []):
            self.call_backend(url, "abort_mpu", bucket, one["Key"], one["UploadId"])

    def call_backend(
        self, url: str, act: str, *args: Any, options: Mapping[str, Any] | None = None, moved_bytes: int = 0
    ) -> Any:
        """Calls the method `act` of fsspec's file system with a deadline. See [Note: an answer in time].

        url: object that errors name
        moved_bytes: bytes that the request sends or receives, for which the deadline is later
        """
        system, asyn = self._file_system, importlib.import_module("fsspec.asyn")
        seconds = self._deadline_seconds(moved_bytes)
        with backend_errors_as_os_errors(url):
            if not system.async_impl:
                return getattr(system, act)(*args, **(options or {}))
            asked = functools.partial(getattr(system, f"_{act}"), *args, **(options or {}))
            try:
                return asyn.sync(system.loop, asked, timeout=seconds)
            except asyn.FSTimeoutError as error:
                raise _no_answer_error(f"no answer within {format_seconds(seconds)}", url) from error

    def call_within_deadline(self, url: str, act: Callable[[], object], *, moved_bytes: int) -> None:
        """Calls `act`, a method of fsspec's file object, which knows no deadline, in a thread.

        url, moved_bytes: as in `call_backend`
        """
        seconds, ended = self._deadline_seconds(moved_bytes), threading.Event()
        outcome: list[BaseException | None] = []

        def call() -> None:
            try:
                act()
                outcome.append(None)
            except (OSError, *_loaded_backend_exceptions()) as error:
                outcome.append(error)
            finally:
                ended.set()

        # A daemon, which a process does not wait for at its end.
        threading.Thread(target=call, name="upload", daemon=True).start()
        if not ended.wait(seconds):
            raise _no_answer_error(f"no answer within {format_seconds(seconds)}", url)
        assert outcome, "the thread has printed an error that is not the backend's"
        if outcome[0] is not None:
            with backend_errors_as_os_errors(url):
                raise outcome[0]

    def _deadline_seconds(self, moved_bytes: int) -> float:
        return self.answer_seconds + max(0, moved_bytes) / _BYTES_PER_SECOND

    @property
    def bucket_url(self) -> str:
        """URL of the bucket."""
        protocol, _, rest = self.url.partition("://")
        return f"{protocol}://{rest.partition('/')[0]}"

    @property
    def _file_system(self) -> Any:
        return _shared_file_system(self.bucket_url, os.getpid())

    def _fsspec_path(self, url: str) -> str:
        return str(self._file_system._strip_protocol(url))


def read_object_range(
    store: ObjectStore, url: str, *, begin: int, end: int, pauses_seconds: Sequence[float] = ()
) -> bytes:
    """Returns exactly the bytes of an object from `begin` to `end`.

    pauses_seconds: time before each further try, after a read that failed. An absent object, a refusal and an
        answer of another length are not tried again.
    """
    for pause in (*pauses_seconds, None):
        try:
            data = store.read_object(url, begin=begin, end=end)
            break
        except OSError as error:
            if pause is None or isinstance(error, FileNotFoundError | PermissionError):
                raise
            logger.info("reading %s again in %s s: %s", without_secrets(url), pause, error)
            time.sleep(pause)
    else:
        raise AssertionError("the last try returns or raises")
    if len(data) == end - begin:
        return data
    raise ExplainedOSError(
        _REMOTE,
        f"{len(data)} bytes for a range of {end - begin}",
        place=without_secrets(url),
        why="it changed while it was read, or the server does not serve ranges",
        fix="the file as it was, or a copy on a disk or in an object store",
    )


class ObjectRangeReader(io.RawIOBase):
    """A file object for reading an object by ranges. A small read also fetches the following bytes.

    pauses_seconds: see `read_object_range`
    """

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        *,
        ahead_bytes: int = 1 << 20,
        pauses_seconds: Sequence[float] = (),
    ) -> None:
        self.name = url
        self._store, self._size = store, store.object_size_bytes(url)
        self._ahead_bytes, self._pauses_seconds = ahead_bytes, pauses_seconds
        self._position, self._begin, self._held = 0, 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any, /) -> int:
        """Reads into `target`. Returns the number of bytes, which may be less than its size; 0 at the end."""
        into = memoryview(target).cast("B")
        wanted = max(0, min(into.nbytes, self._size - self._position))
        at = self._position - self._begin
        if wanted and not 0 <= at < self._held.nbytes:
            end = min(self._size, self._position + max(wanted, self._ahead_bytes))
            data = read_object_range(
                self._store,
                self.name,
                begin=self._position,
                end=end,
                pauses_seconds=self._pauses_seconds,
            )
            self._held = memoryview(data)
            self._begin, at = self._position, 0
        part = self._held[at : at + wanted]
        into[: part.nbytes] = part
        self._position += part.nbytes
        return part.nbytes


@functools.lru_cache(maxsize=8)
def _shared_file_system(url: str, process: int) -> Any:  # fsspec has no types
    """Returns fsspec's file system for a bucket.

    All threads of a process share it (fsspec would create one per thread); a forked process gets its own.
    """
    try:
        core = importlib.import_module("fsspec.core")
        system = core.url_to_fs(url, use_listings_cache=False)[0]
        if hasattr(system, "config_kwargs"):
            # botocore's own verification would raise an error that does not count as damage.
            verifying = "response_checksum_validation"
            if verifying in importlib.import_module("botocore.config").Config.OPTION_DEFAULTS:  # 1.36
                system.config_kwargs.setdefault(verifying, "when_required")
        return system
    except ImportError as error:
        if url.startswith(("s3://", "s3a://")):
            raise MissingExtraError("s3", package="s3fs", needed_for=url) from error
        raise SpecError(
            f"{url} needs a package that is not installed.", got=str(error), fix="pip install what it names"
        ) from error
    except ValueError as error:
        raise SpecError(f"{url} cannot be used.", got=str(error), fix="s3://bucket/run") from error


@contextmanager
def backend_errors_as_os_errors(url: str) -> Generator[None]:
    """Converts exceptions of the backend to OSErrors that name the problem and the object `url`."""
    try:
        yield
    except ExplainedOSError:
        raise
    except (OSError, *_loaded_backend_exceptions()) as error:
        raise _as_os_error(error, url) from error


def _loaded_backend_exceptions() -> list[type[Exception]]:
    return [getattr(sys.modules[module], name) for module, name in _FOREIGN if module in sys.modules]


def _as_os_error(error: BaseException, url: str) -> OSError:
    cause = error.__cause__
    if cause is not None and type(cause).__module__.startswith("aiohttp"):
        # fsspec raises FileNotFoundError for every failure to find the size of a file on a web server.
        error = error if getattr(cause, "status", None) == 404 else cause
    text, url = without_secrets(str(getattr(error, "strerror", None) or error)), without_secrets(url)
    code, said = _s3_error_code(error), text.strip().partition("\n")[0] or type(error).__name__
    kinds = {kind.__name__ for kind in type(error).__mro__}
    reported: OSError
    if code == "NoSuchBucket":
        fix = "make the bucket, or another URL"
        reported = ExplainedOSError(errno.ENXIO, "no such bucket", place=url, fix=fix)
    elif code in ("PreconditionFailed", "412") or isinstance(error, FileExistsError):
        reported = FileExistsError(errno.EEXIST, "it exists already", url)
    elif isinstance(error, FileNotFoundError):
        reported = FileNotFoundError(errno.ENOENT, "no such object", url)
    elif kinds & _NO_CREDENTIALS:
        why = "the store asks for some"
        fix = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine"
        reported = ExplainedOSError(errno.EACCES, "no credentials", place=url, why=why, fix=fix)
    elif isinstance(error, PermissionError):
        why, fix = "these credentials may not do that", "the bucket's policy, or other credentials"
        reported = ExplainedOSError(errno.EACCES, f"access denied: {said}", place=url, why=why, fix=fix)
    elif code in _ALTERED:
        why, fix = (
            "a bit changed on its way to the store",
            "save again; if it stays so, another way to the store",
        )
        reported = ExplainedOSError(_REMOTE, f"{code}: {said}", place=url, why=why, fix=fix)
    elif kinds & _UNREACHED:
        reported = _no_answer_error(said, url)
    else:  # not EIO, which would say that the bytes are gone
        reported = ExplainedOSError(_REMOTE, f"{code or type(error).__name__}: {said}", place=url)
    return reported


def _no_answer_error(said: str, url: str) -> ExplainedOSError:
    why = "the store does not answer"
    address = "for another store than AWS's own, its address in AWS_ENDPOINT_URL"
    fix = f"the network; {address}"
    return ExplainedOSError(errno.ETIMEDOUT, said, place=url, why=why, fix=fix)


def _s3_error_code(error: BaseException | None) -> str | None:
    """Returns S3's code of an error, such as `NoSuchBucket`, or None."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
        error = error.__cause__
    return None


def _parse_size_and_time(entry: Mapping[str, Any]) -> ObjectSizeAndTime:
    times = (entry.get(key) for key in _CHANGED_AT)
    changed = next((time for time in times if isinstance(time, datetime)), None)
    return ObjectSizeAndTime(int(entry["size"]), changed)
