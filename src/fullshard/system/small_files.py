"""Reading small files, and parsing the JSON and TOML in them, with limits on size and nesting; writing TOML.

A file that a user names may be anything: an endless device, a fifo without a writer, text nested until the
stack overflows. Here, every problem with a file is an OSError and every problem with a text is a ValueError;
callers raise the FullshardError of their own package.
"""

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, cast

from fullshard.errors import FullshardError, SpecError
from fullshard.quantities import format_bytes
from fullshard.system.files import open_regular_file

SETTINGS_BYTES = 1 << 20  # limit for files that people write by hand: a run.toml, a config of another tool
VALUE_BYTES = 32 << 20  # limit for files that programs write: a plan, a traced model, a config.json
DEEPEST = 100
_LARGEST_INTEGER = 2**63
_SHOWN_CHARACTERS = 300
_LONG_KEY = re.compile(r"""(?:\.\s*(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')\s*){100}""")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class TomlError(ValueError):
    """Error for text that is not TOML."""


class ForeignErrorTranslator(AbstractContextManager["ForeignErrorTranslator"]):
    """Context that raises `error(message)` in place of any exception of another library that parses a file.

    A FullshardError passes unchanged, and so do exceptions that end the process.
    """

    def __init__(self, error: Callable[[str], Exception]) -> None:
        self._error = error

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # A Rust panic is not an Exception.
        panicked = type(error).__module__ == "pyo3_runtime"
        if panicked or (isinstance(error, Exception) and not isinstance(error, FullshardError)):
            words = " ".join(str(error).split()) or type(error).__name__
            raise self._error(words[:_SHOWN_CHARACTERS]) from error


def read_bytes(path: str | Path, *, most_bytes: int) -> bytes:
    """Reads a regular file of at most `most_bytes`. Raises OSError, whose `strerror` gives the reason."""
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
    """Reads a UTF-8 file of at most `most_bytes`. Raises OSError, or ValueError for other encodings."""
    try:
        return read_bytes(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text (UTF-8): byte {error.start}") from error


def read_last_lines(path: Path, *, most_bytes: int, longest: int) -> Generator[bytes]:
    """Yields the lines in the last `most_bytes` of a regular file, to which a run appends; none without it.

    A line that is longer than `longest` bytes comes in parts, of which only the last may end in a newline.
    Raises OSError.
    """
    with suppress(FileNotFoundError), open(path, "rb", opener=open_regular_file) as file:
        begin = file.seek(0, os.SEEK_END) - most_bytes
        file.seek(max(0, begin))
        if begin > 0:
            file.readline(longest)  # the end of a line
        yield from iter(lambda: file.readline(longest), b"")


def parse_json_line(line: bytes) -> dict[str, Any]:
    """Returns the fields of a JSON object on one line; none if the line is incomplete or another value."""
    if not line.endswith(b"\n"):
        return {}
    try:
        fields: object = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], fields) if isinstance(fields, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Returns the value of the JSON `text`. Raises ValueError for other text or more than 100 levels."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        tree: Any = json.loads(text)
    except RecursionError:
        raise _nesting_too_deep_error() from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's limit on digits
        raise _integer_too_large_error("it has") from None
    check_nesting_depth(tree, most_per_level=len(text))
    if _HALF_OF_A_PAIR.search(text):
        json.dumps(tree, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    return tree


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the tables of TOML text. Raises TomlError, or ValueError over 100 levels or 64-bit integers."""
    if _LONG_KEY.search(text):  # tomllib's memory grows with the square of the parts of a key
        raise _nesting_too_deep_error()
    try:
        # A mark is Windows' of UTF-8. With the newline, an error at the end has a line, too.
        tree = tomllib.loads(text.removeprefix("\ufeff") + "\n")
    except RecursionError:
        raise _nesting_too_deep_error() from None
    except tomllib.TOMLDecodeError as error:
        raise TomlError(f"it is not TOML: {error}") from error
    except ValueError:  # Python's limit on digits
        raise _integer_too_large_error("it has") from None
    check_nesting_depth(tree, most_per_level=len(text))
    check_integer_sizes(tree)
    return tree


def check_nesting_depth(tree: Any, *, most_per_level: int) -> None:
    """Raises ValueError for more than 100 levels of nesting in `tree`, or `most_per_level` values on one.

    References within a text can turn a few lines into many values.
    """
    level: list[Any] = [tree]
    for _ in range(DEEPEST):
        level = list(islice((inner for one in level for inner in _contained_values(one)), most_per_level + 1))
        if len(level) > most_per_level:
            raise ValueError("it stands for more values than it has characters")
        if not level:
            return
    raise _nesting_too_deep_error()


def _contained_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[Any, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list | tuple | set) else ()


def check_integer_sizes(tree: Any) -> None:
    """Raises ValueError for an integer of more than 64 bits in `tree`."""
    for keys, value in iterate_integers(tree):
        if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
            raise _integer_too_large_error(f"{'.'.join(keys)} is")


def iterate_integers(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields (keys of the mappings that lead to it, integer) for every integer in `value`."""
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[Any, Any], value).items():
            yield from iterate_integers(inner, (*keys, str(key)))
    elif isinstance(value, list | tuple | set):
        for inner in cast(Iterable[Any], value):
            yield from iterate_integers(inner, keys)
    elif isinstance(value, int):
        yield keys, value


def _integer_too_large_error(what: str) -> ValueError:
    return ValueError(f"{what} an integer of more than 64 bits")


def _nesting_too_deep_error() -> ValueError:
    return ValueError(f"it is nested more than {DEEPEST} deep")


def read_toml(path: Path, *, fix: str | None = None) -> dict[str, Any]:
    """Reads the tables of a TOML file. Raises SpecError, with `fix` if the file cannot be read."""
    try:
        return parse_toml(read_text(path, most_bytes=SETTINGS_BYTES))
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror, fix=fix) from error
    except ValueError as error:
        raise SpecError(f"{path} cannot be read.", got=str(error)) from error


def toml_text(
    data: Mapping[str, Any], *, head: str = "", comment: Callable[[list[str]], str | None] = lambda _: None
) -> str:
    """Returns `data` as TOML text that reads back to identical values.

    head: text of the comment at the top
    comment: returns the comment on a key or table from its path, or None
    """
    head_lines = [f"# {_single_printable_line(line)}" for line in head.splitlines()]
    return "\n".join([*head_lines, *_iterate_table_lines(data, [], comment=comment)]) + "\n"


def _iterate_table_lines(
    data: Mapping[str, Any], path: list[str], *, comment: Callable[[list[str]], str | None]
) -> Iterator[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    if not tables or len(tables) < len(data):
        yield ""
        if path:
            yield _line_with_comment(f"[{'.'.join(map(_toml_key, path))}]", comment(path))
    for key, value in data.items():
        if key not in tables:
            yield _line_with_comment(f"{_toml_key(key)} = {format_toml_value(value)}", comment([*path, key]))
    for key, value in tables.items():
        yield from _iterate_table_lines(cast(Mapping[str, Any], value), [*path, key], comment=comment)


def _line_with_comment(text: str, comment: str | None) -> str:
    if not comment:
        return text
    comment = f"# {_single_printable_line(comment)}"
    return f"{comment}\n{text}" if "\n" in text else f"{text}  {comment}"


def _single_printable_line(text: str) -> str:
    """Returns `text` on one line without control characters, which a TOML comment may not contain."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


def _toml_key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if bare else format_toml_value(name)


def format_toml_value(value: Any) -> str:
    """Returns a number, text, boolean, list or mapping as TOML text; each inner list has its own line."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{" + ", ".join(f"{_toml_key(key)} = {format_toml_value(one)}" for key, one in pairs) + "}"
    assert isinstance(value, Sequence), f"{type(value).__name__} has no form in TOML"
    items = [format_toml_value(item) for item in cast(Sequence[Any], value)]
    if items and isinstance(value[0], list | tuple):
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return f"[{', '.join(items)}]"


def _float_text(value: float) -> str:
    """Returns the shortest text that reads back to `value`: `0.125`, `2.039e12`."""
    if value == 0 or 1e-3 <= abs(value) < 1e6 or not math.isfinite(value):
        return repr(value)
    mantissa, _, exponent = f"{Decimal(repr(value)).normalize():e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
