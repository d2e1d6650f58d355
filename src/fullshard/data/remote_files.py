"""Lists and opens files of data sources in object stores and on web servers, through fsspec."""

import io
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO, cast

from fullshard.errors import DataError
from fullshard.system.object_store import ObjectRangeReader, ObjectStore, without_secrets

PAUSES_SECONDS = (0.5, 2.0)
"""Times before a read that failed is tried again."""

_AHEAD_BYTES = 4 << 20
# Digests of the content, as stores report them: S3 and web servers, Azure, Google, Hugging Face, GitHub.
_DIGESTS = ("ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "sha")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified", "created", "time")


def list_remote_files(url: str) -> dict[str, tuple[int, str]]:
    """Returns (size in bytes, version) of each file that `url` stands for, by URL.

    url: a file, a glob, or a prefix: then all files below it, also in further prefixes
    version: text that changes whenever the content changes

    Returns nothing for a URL without files. Raises SpecError, MissingExtraError; OSError for a store that
    does not answer; DataError for a file whose size or version is not reported.
    """
    store = ObjectStore(url)
    store.check_url_and_package()
    entries = _list_entries(store, url)
    found: dict[str, tuple[int, str]] = {}
    for name, listed in entries.items():
        at, entry = _url_of_entry(store, name), listed
        if entry.get("size") is None or _version(at, entry) is None:
            entry = store.call_backend(at, "info", at)  # listings of web servers have names alone
        size, version = entry.get("size"), _version(at, entry)
        if size is None or version is None:
            raise DataError(
                f"{without_secrets(at)} cannot be used where it is.",
                got="no size" if size is None else "neither a digest (ETag) nor a time of the last change",
                why="tokens are kept, and made again only when a file changes",
                fix="a copy on a disk or in an object store",
            )
        found[at] = int(size), version
    return found


def open_remote_file(url: str) -> BinaryIO:
    """Opens a file for reading by ranges. It can be sought. Raises OSError, also when it is read."""
    reader = ObjectRangeReader(ObjectStore(url), url, ahead_bytes=_AHEAD_BYTES, pauses_seconds=PAUSES_SECONDS)
    return io.BufferedReader(reader)


def is_hidden_below(url: str, pattern: str) -> bool:
    """Returns whether a file that was found below the prefix `pattern` is hidden, or in a hidden prefix."""
    return any(part.startswith(".") for part in url.removeprefix(pattern).split("/"))


def is_glob(url: str) -> bool:
    """Returns whether a URL holds wildcards. A question mark begins the query of a web address."""
    _, _, path = url.partition("://")[2].partition("/")
    return any(sign in path for sign in ("*[" if url.startswith("http") else "*?["))


def _list_entries(store: ObjectStore, url: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the entries of files by name, as fsspec lists them."""
    everything: Mapping[str, Mapping[str, Any]]
    try:
        if is_glob(url) and not _is_object(store, url):
            everything = store.call_backend(url, "glob", url, options={"detail": True})
        elif url.endswith("/"):
            everything = store.call_backend(url, "find", url, options={"detail": True})
        else:
            entry = cast(Mapping[str, Any], store.call_backend(url, "info", url))
            if entry["type"] != "file":
                return _list_entries(store, f"{url}/")
            everything = {str(entry["name"]): entry}
    except FileNotFoundError:
        return {}
    return {name: entry for name, entry in everything.items() if entry["type"] == "file"}


def _is_object(store: ObjectStore, url: str) -> bool:
    """Returns whether `url`, which has wildcards, is the name of an object."""
    with suppress(OSError):
        return cast(Mapping[str, Any], store.call_backend(url, "info", url))["type"] == "file"
    return False


def _url_of_entry(store: ObjectStore, name: str) -> str:
    """Returns the URL of a name in a listing, which fsspec gives without the protocol or the host."""
    if "://" in name:
        return name
    if store.url.startswith("memory://"):
        return f"memory:/{name}"
    return store.bucket_url + (name if name.startswith("/") else f"/{name.partition('/')[2]}")


def _version(url: str, entry: Mapping[str, Any]) -> str | None:
    for key in _DIGESTS:
        if entry.get(key):
            return f"{entry['size']} {entry[key]}"
    for key in _TIMES:
        if time := entry.get(key):
            when = time.isoformat() if isinstance(time, datetime) else str(time)
            return f"{without_secrets(url)} {entry['size']} {when}"
    return None
