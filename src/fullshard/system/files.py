"""Safe access to files in directories that others can write: links are not followed, fifos do not block."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def open_regular(path: str | Path, flags: int, *, mode: int = 0o666) -> int:
    """Opens a regular file and nothing else. Can serve as an `opener` of `open`.

    A link may lead out of the directory, and a fifo or a device may never end. Raises OSError, with ELOOP for
    a link and ENXIO for anything else that is not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a link; links are not followed", str(path)) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a fifo without a reader, a socket, a directory
            raise _irregular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def write_whole(path: Path, text: str) -> None:
    """Replaces `path` by a file that holds `text`, flushed to the disk. A reader finds the old file or the
    new one.

    A link is replaced, not followed. Raises OSError.
    """
    part = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):  # the earlier error is the one to show
            part.unlink(missing_ok=True)


def _irregular(path: str | Path) -> OSError:
    return OSError(errno.ENXIO, "not a regular file", str(path))
