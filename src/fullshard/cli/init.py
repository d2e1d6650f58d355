"""`fullshard init`: a run.toml with the keys that people change, or with all, from the fields of Run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.system.terminal import escape_to_single_line

if TYPE_CHECKING:
    from fullshard.spec.value import FrozenModel

_HEAD = """\
# A run of fullshard: {which}, with defaults. A key that is left out has its default.
# A key behind a # is unset. Start it with: fullshard train {name}
"""
_SHORT, _ALL = "the keys that are often changed (all: fullshard init --all)", "every key"
# Section -> the keys that people change.
COMMON_KEYS: Mapping[str, tuple[str, ...]] = {
    "run": ("dir", "ranks", "restarts"),
    "model": ("d_model", "layers"),
    "adapter": ("rank",),
    "data": ("source", "paths", "tokenizer", "sequence_length", "packing"),
    "train": ("steps", "global_batch", "microbatch"),
    "optimizer": ("learning_rate", "weight_decay"),
    "schedule": ("warmup_steps",),
    "sharding": ("strategy",),
    "precision": ("mode",),
    "checkpoint": ("every",),
}
_MODEL_NOTE = (
    '# Sizes of the reference decoder; or hf = "path or cached name", a model of transformers: docs/models.md'
)
_COMMENT_COLUMN = 34


def init(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")] = Path("run.toml"),
    *,
    every: Annotated[bool, typer.Option("--all", help="Write every key, with its values.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
) -> None:
    """Write a run.toml with the keys that people change."""
    from fullshard.system.files import write_file_or_stream
    from fullshard.system.targets import check_output_file, convert_write_errors

    name = escape_to_single_line(path.name)
    text = default_run_toml_text(name) if every else short_run_toml_text(name)
    check_output_file(path, is_kind=None, force=force, streams=True)
    with convert_write_errors(path):
        write_file_or_stream(path, text)
    typer.echo(escape_to_single_line(f"{path}"))


def default_run_toml_text(name: str = "run.toml") -> str:
    """Returns the text of a run.toml with all defaults: it loads as `Run()`."""
    from fullshard.spec.run import Run

    lines = [_HEAD.format(name=name, which=_ALL)]
    run, schema = Run(), Run.model_json_schema()
    for section in Run.model_fields:
        if isinstance(getattr(run, section), tuple):  # a list of tables, which has none by default
            about = _list_item_description(schema["properties"][section], schema["$defs"])
            lines += [f"# [[{section}]]", *_comment_lines(about), ""]
        else:
            lines += _section_lines(section, getattr(run, section), definitions=schema["$defs"])
    return "\n".join(lines) + "\n"


def short_run_toml_text(name: str = "run.toml") -> str:
    """Returns the text of a run.toml with the defaults of COMMON_KEYS: it loads as `Run()`."""
    from fullshard.spec.run import Run
    from fullshard.spec.value import field_descriptions

    lines = [_HEAD.format(name=name, which=_SHORT)]
    run, definitions = Run(), Run.model_json_schema()["$defs"]
    for section, keys in COMMON_KEYS.items():
        value = getattr(run, section)
        about = field_descriptions(type(value))
        lines += [f"[{section}]", *([_MODEL_NOTE] if section == "model" else [])]
        for key in keys:
            lines += [f"# {key}: {about[key]}"] if key in about else []
            lines.append(_key_line(key, value, definitions=definitions))
        lines.append("")
    return "\n".join(lines)


def _key_line(key: str, section: "FrozenModel", *, definitions: Mapping[str, Any]) -> str:
    """Returns `key = default  # the values that it may have`; behind a # if it is unset."""
    from fullshard.system.small_files import format_toml_value

    default = getattr(section, key)
    line = f"{key} = {format_toml_value(default)}" if default is not None else f"# {key} ="
    field = definitions[type(section).__name__]["properties"][key]
    return f"{line:<{_COMMENT_COLUMN - 1}} # {_allowed_values_text(field, definitions)}"


def _section_lines(name: str, value: "FrozenModel", *, definitions: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the table `[name]`: its docstring as comments, its keys, then its nested tables."""
    schema = definitions[type(value).__name__]
    yield f"[{name}]"
    yield from _comment_lines(schema.get("description", ""))
    tables: list[str] = []
    for key, field in schema["properties"].items():
        if hasattr(type(getattr(value, key)), "model_fields"):
            tables.append(key)
            continue
        yield from _comment_lines(_list_item_description(field, definitions))
        yield _key_line(key, value, definitions=definitions)
    yield ""
    for key in tables:
        yield from _section_lines(f"{name}.{key}", getattr(value, key), definitions=definitions)


def _comment_lines(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _list_item_description(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Returns the description of a list's items if they are tables."""
    item = field.get("items", {})
    return str(_resolve_reference(item, definitions).get("description", "")) if "$ref" in item else ""


def _resolve_reference(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    return definitions[str(schema["$ref"]).rpartition("/")[2]] if "$ref" in schema else schema


def _allowed_values_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    schema = _resolve_reference(schema, definitions)
    if "anyOf" in schema:
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return " or ".join(_allowed_values_text(choice, definitions) for choice in choices)
    if "enum" in schema or "const" in schema:
        return ", ".join(str(choice) for choice in schema.get("enum", [schema.get("const")]))
    words = {
        **{"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"},
        **{"array": "a list", "object": "a table"},
    }
    return words[schema["type"]]
