"""Reads a JSON array element by element, without holding the whole file in memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
# An error closer to the end of what was read may come from a literal, number or escape that is cut: `fals`.
_CUT_CHARACTERS = 16


def read_json_array(file: BinaryIO) -> Iterator[Any]:
    """Yields the elements of the array that is the whole content of `file`, in UTF-8.

    Holds about two of the larger of an element and 1 MiB in memory. Raises ValueError for content that is not
    one array, after the elements before the error; RecursionError for an element that is nested too deep.
    """
    text = _TextWindow(file)
    if text.next_character() != "[":
        raise ValueError("no '[' at the beginning")
    text.at += 1
    separator = "]" if text.next_character() == "]" else ","
    while separator == ",":
        yield text.next_value()
        separator = text.next_character()
        if separator not in (",", "]"):
            raise ValueError(
                f"{separator!r} where ',' or ']' belongs" if separator else "the array is cut off"
            )
        text.at += separator == ","
    text.at += 1
    if behind := text.next_character():
        raise ValueError(f"{behind!r} behind the end of the array")


def first_character(file: BinaryIO) -> str:
    """Returns the first character of a file in UTF-8 that is not white space; "" for none."""
    try:
        return _TextWindow(file, chunk_bytes=4096).next_character()
    except UnicodeDecodeError:
        return ""


class _TextWindow:
    """The part of a text file that has been read and is still needed. `at` is the current place in it."""

    def __init__(self, file: BinaryIO, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._reader = codecs.getreader("utf-8-sig")(file)
        self._decoder = json.JSONDecoder()
        self._text, self._chunk_bytes = "", chunk_bytes
        self.at = 0

    def next_character(self) -> str:
        """Returns the next character that is not white space, and moves `at` to it; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self.at)
            assert match is not None, "it matches nothing, too"
            self.at = match.end()
            if self.at < len(self._text) or not self._read_more():
                return self._text[self.at : self.at + 1]

    def next_value(self) -> Any:
        """Returns the next JSON value, and moves `at` behind it. Raises ValueError, RecursionError."""
        self.next_character()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self.at)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self._text) - _CUT_CHARACTERS or "Unterminated" in error.msg
                if not (cut and self._read_more()):
                    raise ValueError(error.msg) from error
                continue
            # A number at the end of what was read may continue.
            if end < len(self._text) or not self._read_more():
                self.at = end
                return value

    def _read_more(self) -> bool:
        """Reads at least as much as is still needed, so that a long value is parsed only a few times."""
        rest = self._text[self.at :]
        more = self._reader.read(max(self._chunk_bytes, len(rest)))
        self._text, self.at = rest + more, 0
        return bool(more)
