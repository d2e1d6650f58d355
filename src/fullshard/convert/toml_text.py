"""Settings as the text of a run.toml."""

import json
from collections.abc import Mapping
from typing import Any, cast


def toml_text(settings: Mapping[str, Any], *, origins: Mapping[str, str], head: str) -> str:
    """Returns `settings`, given by dotted key, as TOML tables, each value with a comment on its origin."""
    tables: dict[str, list[str]] = {}
    for target in settings:
        table, _, key = target.rpartition(".")
        comment = f"  # {_on_one_line(origins[target])}" if target in origins else ""
        tables.setdefault(table, []).append(f"{key} = {toml_value(settings[target])}{comment}")
    parts = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()]
    return "\n\n".join([f"# {_on_one_line(head)}", *parts]) + "\n"


def toml_value(value: Any) -> str:
    """Returns a number, text, boolean, list or mapping as TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(one) for one in cast(list[Any], value))}]"
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(one)}" for key, one in items) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _on_one_line(text: str) -> str:
    """Returns `text` on one line without control characters, which a TOML comment may not contain."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
