"""Reading and writing TOML files."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.system.small_files import SETTINGS_BYTES, parse_toml, read_text


def read_toml(path: Path, *, fix: str | None = None) -> dict[str, Any]:
    """Reads the tables of a TOML file. Raises SpecError, with `fix` if the file cannot be read."""
    try:
        return parse_toml(read_text(path, most_bytes=SETTINGS_BYTES))
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror, fix=fix) from error
    except ValueError as error:
        raise SpecError(f"{path} cannot be read.", got=str(error)) from error


def toml_text(data: Mapping[str, Any], *, head: str, comment: Callable[[list[str]], str | None]) -> str:
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
