"""Escaping of control characters in untrusted text for a terminal or a log.

A name in a checkpoint, a directory name or a model's output may contain escapes that clear the screen, set
the title or reverse the line. Such a character is shown as `\\u001b`, which JSON and TOML can read back.
"""

import logging
import os
import re
from typing import TextIO

# C0 except newline and tab, DEL, C1, line separators, bidirectional marks, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def is_live_terminal(file: TextIO) -> bool:
    """Returns whether `file` is a terminal that can redraw a line."""
    return file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def escape_control_characters(text: str) -> str:
    """Returns `text` with its control characters escaped, except newlines and tabs."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_to_single_line(text: str) -> str:
    """Returns `text` as one line, with its control characters escaped, including newlines and tabs."""
    return escape_control_characters(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_log_messages() -> None:
    """Makes the logger `fullshard` escape control characters in all its messages."""
    logging.getLogger("fullshard").addFilter(_escape_log_record)


def _escape_log_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = escape_control_characters(record.getMessage()), None
    return True
