"""Standard streams whose reader may leave: `fullshard report | head`, a closed terminal, a full disk."""

import errno
import io
import os
import sys
from typing import TextIO

CLOSED_OUTPUT_EXIT_CODE = 141
"""Exit code of a shell's program that SIGPIPE ended."""
_GONE = (errno.EPIPE, errno.EIO)


def prepare_standard_streams() -> None:
    """Makes this process independent of readers of its messages. For the start of a program.

    Standard streams that the parent closed are opened on /dev/null, or the next file would be in their place.
    Writing to standard error raises no OSError. If the reader of standard output has left, the process ends
    quietly, with CLOSED_OUTPUT_EXIT_CODE: what it printed there was its purpose.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = tolerant_stream(1, like=sys.stdout, is_result=True)
    sys.stderr = tolerant_stream(2, like=sys.stderr, is_result=False)


def tolerant_stream(descriptor: int, *, like: TextIO | None, is_result: bool) -> TextIO:
    """Returns a text stream on `descriptor`, with the encoding and the buffering of `like`.

    Characters that the encoding lacks are written as escapes: text of a model must not end a finished run.
    """
    if like is not None:
        like.flush()
    errors = getattr(like, "errors", "backslashreplace")
    return io.TextIOWrapper(
        io.BufferedWriter(_TolerantFile(descriptor, is_result=is_result)),
        encoding=getattr(like, "encoding", "utf-8"),
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=getattr(like, "line_buffering", True),
        write_through=not is_result,
    )


class _TolerantFile(io.FileIO):
    """A standard stream that drops what cannot be written.

    is_result: the first time, raises SystemExit if the reader has left, else the error
    """

    def __init__(self, descriptor: int, *, is_result: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = is_result

    def write(self, data: object, /) -> int | None:
        try:
            return super().write(data)  # type: ignore[reportArgumentType]
        except OSError as error:
            if self._raises:
                self._raises = False  # Python flushes its buffers again at its end
                if error.errno in _GONE:
                    raise SystemExit(CLOSED_OUTPUT_EXIT_CODE) from error
                raise
            return memoryview(data).nbytes  # type: ignore[reportArgumentType]
