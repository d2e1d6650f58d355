"""Detection of a config's format from its text, and parsing into a tree of keys."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from fullshard.convert.reader import ConfigFormat, UnevaluatedExpression, iterate_leaves
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.small_files import (
    ForeignErrorTranslator,
    check_integer_sizes,
    check_nesting_depth,
    parse_json,
    parse_toml,
)

_MOST_KEYS = 5_000
_YAML_LETTERS = 1 << 17  # the YAML parser takes about one second for this many characters
_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
# Keys of which one suffices to recognise a format, in the order in which formats are tried.
_FORMAT_KEYS = {
    ConfigFormat.AXOLOTL: {"sequence_len", "val_set_size"},
    ConfigFormat.TRAINER: {
        "per_device_train_batch_size",
        "model_name_or_path",
        "num_train_epochs",
        "lr_scheduler_type",
    },
    ConfigFormat.ACCELERATE: {
        "compute_environment",
        "distributed_type",
        "deepspeed_config",
        "num_machines",
        "num_processes",
    },
    ConfigFormat.DEEPSPEED: {
        *_DEEPSPEED,
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16",
        "bf16",
        "optimizer",
    },
}
_MAPPING_FORMATS = (None, *_FORMAT_KEYS)
_TORCHTITAN = {"job", "training", "parallelism", "activation_checkpoint", "lr_scheduler", "metrics"}
_FORMS = "an Accelerate, axolotl or Trainer YAML, a DeepSpeed JSON, or a torchtitan TOML"
# Parts of text that is nearly JSON: strings, comments (DeepSpeed reads them, as Hjson), placeholders. What is
# not closed ends with the text, so that no part is searched twice.
_STRING = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'
_JSON_PARTS = re.compile(
    rf"(?P<string>{_STRING})|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)"
    r"|(?P<variable>\$\{[^}]*(?:\}|\Z)|\{\{.*?(?:\}\}|\Z)|\$\w+)",
    re.DOTALL,
)
_STRING_OR_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)
_TEMPLATE_MARKS = ("{{", "{%")

ParsedConfig = tuple[ConfigFormat, dict[str, Any]]


def parse_config(text: str, *, name: str, format: ConfigFormat | None) -> ParsedConfig:
    """Returns (format, nested settings) of `text`. Raises SpecError if it has no known format."""
    if name.endswith(".py"):
        raise SpecError(
            f"{name} is a program.",
            why="its settings are known only when it runs",
            fix=f"{_FORMS}; or fullshard init run.toml, and docs/names.md, which has both names of a setting",
        )
    for read in (_try_parse_json, _try_parse_torchtitan_toml, _try_parse_yaml):  # JSON is YAML too
        found = read(text, format)
        if found is not None:
            return _with_plain_values(found, text, name=name)
    if _has_template_marks(text) and _load_yaml(text) is None:
        line = next(line for line in text.splitlines() if _has_template_marks(line))
        fix = "fill in its placeholders first"
        raise SpecError(f"{name} is a template.", got=_first_nonblank_line(line), fix=fix)
    wanted = f"no config of {format}" if format else "of no format that is known here"
    raise SpecError(
        f"{name} is {wanted}.",
        got=_first_nonblank_line(text),
        why=_syntax_error_text(text, name),
        fix=f"{_FORMS}; --from says which it is meant to be",
    )


def _try_parse_json(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    if format not in _MAPPING_FORMATS:
        return None
    try:
        tree = parse_json(text)
    except ValueError:
        try:
            tree = parse_json(_with_json_syntax(text))
        except ValueError:
            return None
    return _recognize_mapping_format(tree, format)


def _with_json_syntax(text: str) -> str:
    """Returns `text` without comments and trailing commas, and with placeholders as strings."""

    def replace(part: re.Match[str]) -> str:
        return part["string"] or (json.dumps(part["variable"]) if part["variable"] else "")

    return _STRING_OR_TRAILING_COMMA.sub(r"\1", _JSON_PARTS.sub(replace, text))


def _try_parse_yaml(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    if format not in _MAPPING_FORMATS:
        return None
    found = _recognize_mapping_format(_load_yaml(text), format)
    # DeepSpeed's are JSON; a YAML with one of its common names, such as `optimizer`, is another tool's.
    if format is None and found and found[0] is ConfigFormat.DEEPSPEED and not _DEEPSPEED & found[1].keys():
        return None
    return found


def _load_yaml(text: str) -> Any:
    """Returns the value of YAML text; None for other text, for long text, and for references that expand."""
    import yaml

    if len(text) > _YAML_LETTERS:
        return None
    try:
        with ForeignErrorTranslator(lambda got: SpecError("it is not YAML.", got=got)):
            tree: Any = yaml.safe_load(text)
            check_nesting_depth(tree, most=len(text))
    except SpecError:
        return None
    return tree


def _recognize_mapping_format(tree: Any, format: ConfigFormat | None) -> ParsedConfig | None:
    """Returns a config of `format`, or of the format that its keys belong to; None if no format has them."""
    if not isinstance(tree, Mapping) or not tree:
        return None
    keyed = {str(key): value for key, value in cast(Mapping[Any, Any], tree).items()}
    found = format or next((one for one, keys in _FORMAT_KEYS.items() if keys & keyed.keys()), None)
    return None if found is None else (found, keyed)


def _with_plain_values(source: ParsedConfig, text: str, *, name: str) -> ParsedConfig:
    """Returns `source` with JSON types only. Raises SpecError for values that no run.toml can have."""
    format, tree = source
    try:
        check_nesting_depth(tree, most=len(text))
        check_integer_sizes(tree)
        plain = {key: _plain_json_value(value) for key, value in tree.items()}
        json.dumps(plain, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError as error:
        raise SpecError(f"{name} has values that no run has.", got=str(error)) from error
    if len(list(iterate_leaves(plain))) > _MOST_KEYS:
        raise SpecError(f"{name} is not a config.", got=f"more than {_MOST_KEYS:,} keys")
    return format, plain


def _plain_json_value(value: Any) -> Any:
    """Converts keys, and values that are not JSON types, to text: YAML allows any type."""
    if isinstance(value, Mapping):
        return {str(key): _plain_json_value(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple | set):
        return [_plain_json_value(inner) for inner in cast(Iterable[Any], value)]
    if isinstance(value, str) and _is_placeholder(value):
        return UnevaluatedExpression(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _has_template_marks(text: str) -> bool:
    return any(mark in text for mark in _TEMPLATE_MARKS)


def _is_placeholder(text: str) -> bool:
    """Returns True for text that a template engine or a shell fills in: `${A}`, `a/${B}`, `$A`, `{{ a }}`."""
    name = text.removeprefix("$")
    return (
        "}" in text.partition("${")[2]
        or (name != text and name.isidentifier())
        or (text.startswith(_TEMPLATE_MARKS) and text.endswith(("}}", "%}")))
    )


def _try_parse_torchtitan_toml(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    if format not in (None, ConfigFormat.TORCHTITAN):
        return None
    try:
        tree = parse_toml(text)
    except ValueError:
        return None
    sections = {key for key, value in tree.items() if isinstance(value, dict)}
    if format is None and sections and sections <= Run.model_fields.keys() and not sections & {"training"}:
        raise SpecError(
            "this is a run.toml already.", got=f"[{'], ['.join(sections)}]", fix="fullshard train"
        )
    if format is not None or _TORCHTITAN & sections:
        return ConfigFormat.TORCHTITAN, tree
    return None


def _syntax_error_text(text: str, name: str) -> str | None:
    """Returns the parser's error if `name` ends in .json or .toml and `text` is not that; else None."""
    try:
        if name.endswith(".json"):
            parse_json(text)
        elif name.endswith(".toml"):
            parse_toml(text)
    except (ValueError, RecursionError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None


def _first_nonblank_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 80 else f"{line[:80]}…"
