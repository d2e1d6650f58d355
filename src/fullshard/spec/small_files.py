"""Small files, which are read whole, and the JSON and TOML in them.

A file that somebody names may be anything: a device without an end, a fifo that nobody writes to, text that
is nested until the stack is gone. So there is a limit on what is read, and one on what is parsed. Everything
that is wrong with a file is an OSError here, everything that is wrong with a text a ValueError, and the
caller raises the FullshardError of its room.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, cast

from fullshard.quantities import format_bytes

SETTINGS_BYTES = 1 << 20
"""What people write by hand: a run.toml, a config of another tool."""

VALUE_BYTES = 32 << 20
"""What programs write for programs: a plan, a traced model, a config.json."""

DEEPEST = 100
_LARGEST_INTEGER = 2**63
# Of tomllib, for a key and for a table: https://github.com/python/cpython/blob/3.13/Lib/tomllib/_parser.py
_TWICE = re.compile(r"(Cannot overwrite a value|Cannot declare \(.*\) twice)(?: \(at line (\d+),)?")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class TomlError(ValueError):
    """A text that is not TOML."""


def read_bytes(path: str | Path, *, most_bytes: int) -> bytes:
    """Returns the bytes of a regular file that has at most `most_bytes`.

    Raises OSError, whose `strerror` says why, for a file that cannot be read, that is larger, or that is a
    directory, a fifo or a device; and for a path that no file can have.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have such a name") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return data


def read_text(path: str | Path, *, most_bytes: int) -> str:
    """Returns the UTF-8 text of a file that `read_bytes` reads. Raises what that raises, and ValueError."""
    try:
        return read_bytes(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text (UTF-8): byte {error.start}") from error


def parse_json(text: str | bytes) -> Any:
    """Returns what the JSON `text` holds. Raises ValueError for anything else, and where it is nested deeper
    than `DEEPEST`."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        tree: Any = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's limit on digits
        raise _too_large("it has") from None
    check_depth(tree, most=len(text))
    if _HALF_OF_A_PAIR.search(text):
        json.dumps(tree, ensure_ascii=False).encode()  # which raises for half of a surrogate pair
    return tree


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the tables of the TOML `text`. Raises TomlError for anything else; ValueError for tables that
    are nested deeper than `DEEPEST`, and for integers of more than 64 bits."""
    try:
        tree = tomllib.loads(f"{text}\n")  # so that an error at its end has a line, too
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError as error:
        raise TomlError(f"it is not TOML: {_plainly(str(error), text)}") from error
    except ValueError:  # Python's limit on digits
        raise _too_large("it has") from None
    check_depth(tree, most=len(text))
    check_integers(tree)
    return tree


def check_depth(tree: Any, *, most: int) -> None:
    """Raises ValueError for mappings and lists that are nested deeper than `DEEPEST`, and for a level of them
    with more than `most` values (which references within a text can make of a few lines)."""
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        level = list(islice((inner for one in level for inner in _inner(one)), most + 1))
        if len(level) > most:
            raise ValueError("it stands for more values than it has characters")
        if not level:
            return
    raise _too_deep()


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[Any, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list | tuple | set) else ()


def check_integers(value: Any, keys: tuple[str, ...] = ()) -> None:
    """Raises ValueError that names the keys of an integer of more than 64 bits in `value`."""
    if isinstance(value, dict):
        for key, inner in cast(dict[Any, Any], value).items():
            check_integers(inner, (*keys, str(key)))
    elif isinstance(value, list | tuple | set):
        for inner in cast(list[Any], value):
            check_integers(inner, keys)
    elif isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise _too_large(f"{'.'.join(keys)} is")


def _plainly(message: str, text: str) -> str:
    """Returns tomllib's message; for a key that stands twice, one that names the key."""
    twice = _TWICE.match(message)
    if twice is None:
        return message
    line = text.split("\n")[int(twice[2]) - 1] if twice[2] else ""
    name = line.partition("=")[0].strip() if "=" in line or "[" in line else "a key"
    return f"{name} stands twice{message[twice.end(1) :]}"


def _too_large(what: str) -> ValueError:
    return ValueError(f"{what} an integer of more than 64 bits")


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEEPEST} deep")
