"""Text of others on its way to a terminal or a log: control characters are shown, not obeyed.

A name in a checkpoint, a directory or what a model writes may hold escapes that clear the screen, set the
title or turn the line around. Such a character is shown as `\\u001b`, which JSON and TOML read back.
"""

import logging
import re

# C0 except newline and tab, DEL, C1, line separators, marks that change the direction of text, half pairs.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Returns `text` with its control characters escaped; newlines and tabs stay."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_line(text: str) -> str:
    """Returns `text` as one line: newlines and tabs are escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_logs() -> None:
    """Makes what fullshard logs in this process printable. For a process of ours, not for the library."""
    logging.getLogger("fullshard").addFilter(_escape)


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    return True
