"""Requests to an object store through fsspec. Failures are raised as OSError.

    s3://bucket/run        pip install "fullshard[s3]"
    gs://…, abfs://…       whatever fsspec knows, once its package is installed

Each backend reads its own settings of credentials, endpoint, timeouts and retries; S3 those of the AWS
command line (`AWS_PROFILE`, `AWS_ENDPOINT_URL`, `AWS_MAX_ATTEMPTS`, …).
"""

import errno
import functools
import importlib
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, cast

from fullshard.errors import MissingExtraError, SpecError
from fullshard.system.files import ExplainedOSError

_AHEAD_BYTES = 1 << 20
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
    """

    url: str

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
        return self.call_backend(url, "cat_file", path, options=options)

    def object_size_bytes(self, url: str) -> int:
        info = self.call_backend(url, "info", self._fsspec_path(url), options={"refresh": True})
        return int(info["size"])

    def put_new_object(self, url: str, *, data: bytes) -> None:
        """Creates a small object in one request.

        Raises FileExistsError if the object exists (fsspec checks this beforehand for a store without
        if-none-match).
        """
        self.call_backend(url, "pipe_file", self._fsspec_path(url), data, options={"mode": "create"})

    @contextmanager
    def open_for_writing(self, url: str, *, part_bytes: int) -> Generator[BinaryIO]:
        """Opens an object for writing in parts. It exists only after the context ends without error.

        The last part is sent when the context ends, which can therefore raise OSError.
        """
        with backend_errors_as_os_errors(url):
            file, ended = self._file_system.open(self._fsspec_path(url), "wb", block_size=part_bytes), False
            try:
                yield file
                file.close()
                ended = True
            finally:
                if not ended:
                    with suppress(OSError, *_loaded_backend_exceptions()):  # the earlier error is shown
                        file.discard()
                    if hasattr(file, "blocksize"):  # fsspec would finish the upload of its own open file
                        file.closed = True

    def remove_objects(self, urls: Sequence[str]) -> None:
        if urls:
            self.call_backend(self.url, "rm", [self._fsspec_path(url) for url in urls])

    def call_backend(self, url: str, act: str, *args: Any, options: Mapping[str, Any] | None = None) -> Any:
        """Calls the method `act` of fsspec's file system. Errors name the object `url`."""
        with backend_errors_as_os_errors(url):
            return getattr(self._file_system, act)(*args, **(options or {}))

    @property
    def _file_system(self) -> Any:
        protocol, _, rest = self.url.partition("://")
        return _shared_file_system(f"{protocol}://{rest.partition('/')[0]}", os.getpid())

    def _fsspec_path(self, url: str) -> str:
        return str(self._file_system._strip_protocol(url))


def open_object(store: ObjectStore, url: str) -> BinaryIO:
    """Opens an object for reading by ranges. A read also fetches the megabyte that follows."""
    base: Any = importlib.import_module("fsspec.spec").AbstractBufferedFile

    class ObjectRangeReader(base):
        name = url

        def _fetch_range(self, begin: int, end: int) -> bytes:
            data = store.read_object(url, begin=begin, end=end)
            if len(data) != end - begin:
                what, why = f"{len(data)} bytes for a range of {end - begin}", "it changed while it was read"
                raise ExplainedOSError(_REMOTE, what, place=without_secrets(url), why=why)
            return data

    size_bytes = store.object_size_bytes(url)
    return cast(BinaryIO, ObjectRangeReader(None, url, size=size_bytes, block_size=_AHEAD_BYTES))


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
            system.retries = 2  # of five tries of botocore, each of which waits 15 s for an answer
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
        why = "a bit changed on its way to the store"
        fix = "save again; if it stays so, another way to the store"
        reported = ExplainedOSError(_REMOTE, f"{code}: {said}", place=url, why=why, fix=fix)
    elif kinds & _UNREACHED:
        why = "the store does not answer"
        fix = "the network; for another store than AWS's own, its address in AWS_ENDPOINT_URL"
        reported = ExplainedOSError(errno.ETIMEDOUT, said, place=url, why=why, fix=fix)
    else:  # not EIO, which would say that the bytes are gone
        reported = ExplainedOSError(_REMOTE, f"{code or type(error).__name__}: {said}", place=url)
    return reported


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
