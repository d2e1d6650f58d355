"""Files: opened safely where others can write, replaced atomically, flushed to the disk, digested."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash


def open_regular_file(path: str | Path, flags: int, *, mode: int = 0o666) -> int:
    """Opens a regular file, and returns its descriptor. Can be passed to `open` as `opener`.

    Raises OSError, with ELOOP for a symbolic link and ENXIO for anything else that is not a regular file.
    """
    not_regular = OSError(errno.ENXIO, "not a regular file", str(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a link; links are not followed", str(path)) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a fifo without a reader, a socket, a directory
            raise not_regular from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular
    return descriptor


@contextmanager
def atomic_replace_context(path: Path, *, draft: Path | None = None) -> Generator[Path]:
    """Yields a path beside `path` for the block to create. That file then atomically replaces `path`.

    If the block fails, the new file is removed. A link is replaced, not followed. Raises OSError.

    draft: the path to yield, whose file from a killed process is removed first; by default a random name
    """
    if draft is None:
        draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    else:
        draft.unlink(missing_ok=True)
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):  # the earlier error is the one to show
            draft.unlink(missing_ok=True)


def write_file_atomically(path: Path, text: str | bytes) -> None:
    """Atomically replaces `path` by a file that contains `text`, flushed to the disk. Raises OSError."""
    with atomic_replace_context(path) as draft, draft.open("xb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path, *, fsync: Callable[[int], object] = os.fsync) -> None:
    """Flushes a file or directory to the disk. A rename is durable once its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_directory(path: Path) -> None:
    """Creates `path` and its missing parents, and flushes them to the disk."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        fsync_path(one.parent)


def xxh3_digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the 128-bit XXH3 digest as 32 hexadecimal digits. It detects corruption, not tampering."""
    found = xxhash.xxh3_128()
    found.update(data)  # releases the GIL
    return found.hexdigest()
