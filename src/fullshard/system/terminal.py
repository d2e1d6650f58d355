"""Escaping of control characters for a terminal or a log, and standard streams whose reader may leave.

A name in a checkpoint, a directory name or a model's output may contain escapes that clear the screen, set
the title or reverse the line. Such a character is shown as `\\u001b`, which JSON and TOML can read back.
"""

import errno
import io
import logging
import os
import re
import sys
from typing import TextIO

# C0 except newline and tab, DEL, C1, line separators, bidirectional marks, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
CLOSED_OUTPUT_EXIT_CODE = 141
"""Exit code of a shell's program that SIGPIPE ended."""
_GONE = (errno.EPIPE, errno.EIO)


def is_live_terminal(file: TextIO) -> bool:
    """Returns whether `file` is a terminal that can redraw a line."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def escape_control_characters(text: str) -> str:
    """Returns `text` with its control characters escaped, except newlines and tabs."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_to_stderr(text: str) -> None:
    """Prints `text`, escaped, on standard error at once."""
    print(escape_control_characters(text), file=sys.stderr, flush=True)


def escape_to_single_line(text: str) -> str:
    """Returns `text` as one line, with its control characters escaped, including newlines and tabs."""
    return escape_control_characters(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_log_messages() -> None:
    """Makes the logger `fullshard` escape control characters in all its messages."""
    logging.getLogger("fullshard").addFilter(_escape_log_record)


def _escape_log_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = escape_control_characters(record.getMessage()), None
    return True


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
    sys.stdout = open_stream_dropping_failed_writes(1, like=sys.stdout, raises_first_failure=True)
    sys.stderr = open_stream_dropping_failed_writes(2, like=sys.stderr, raises_first_failure=False)


def open_stream_dropping_failed_writes(
    descriptor: int, *, like: TextIO | None, raises_first_failure: bool
) -> TextIO:
    """Returns a text stream on `descriptor`, with the encoding and the buffering of `like`.

    Characters that the encoding lacks are written as escapes: text of a model must not end a finished run.
    """
    if like is not None:
        like.flush()
    errors = getattr(like, "errors", "backslashreplace")
    return io.TextIOWrapper(
        io.BufferedWriter(_FileDroppingFailedWrites(descriptor, raises_first_failure=raises_first_failure)),
        encoding=getattr(like, "encoding", "utf-8"),
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=getattr(like, "line_buffering", True),
        write_through=not raises_first_failure,
    )


class _FileDroppingFailedWrites(io.FileIO):
    """A standard stream that drops what cannot be written.

    raises_first_failure: the first time, raises SystemExit if the reader has left, else the error
    """

    def __init__(self, descriptor: int, *, raises_first_failure: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises_first_failure

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
