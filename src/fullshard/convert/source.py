"""Detection of a config's format from its text, and parsing into a tree of keys."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from fullshard.convert.python_source import FSDP_CALLS, LIGHTNING_HOSTS, LIGHTNING_STRATEGIES, PythonSource
from fullshard.convert.reader import ConfigFormat, iterate_leaves
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
_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "num_machines"}
_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
    "optimizer",
}
_TORCHTITAN = {"job", "training", "parallelism", "activation_checkpoint", "lr_scheduler", "metrics"}
_FORMS = (
    "an Accelerate YAML, a DeepSpeed JSON, a torchtitan TOML, or Python that calls FSDP(…), fully_shard(…), "
    "FSDP2Config(…), Fabric(…) or FSDPStrategy(…)"
)

ParsedConfig = tuple[ConfigFormat, dict[str, Any], list[str]]


def parse_config(text: str, *, name: str, format: ConfigFormat | None) -> ParsedConfig:
    """Returns (format, nested settings, notes) of `text`. Raises SpecError if it has no known format."""
    # The order matters: TOML's `[training]` and JSON are Python too, and JSON is YAML.
    for read in (_try_parse_json, _try_parse_torchtitan_toml, _try_parse_python, _try_parse_yaml):
        found = read(text, format)
        if found is not None:
            return _with_plain_values(found, text, name=name)
    wanted = f"no config of {format}" if format else "of no format that is known here"
    raise SpecError(
        f"{name} is {wanted}.",
        got=_first_nonblank_line(text),
        why=_syntax_error_text(text, name),
        fix=f"{_FORMS}; --from says which it is meant to be",
    )


def _try_parse_json(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    if format not in (None, ConfigFormat.DEEPSPEED, ConfigFormat.ACCELERATE):
        return None
    try:
        tree = parse_json(text)
    except ValueError:
        return None
    return _recognize_mapping_format(tree, format)


def _try_parse_yaml(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    """Parses YAML. YAML's references may not expand to more values than the text has characters."""
    if format not in (None, ConfigFormat.ACCELERATE, ConfigFormat.DEEPSPEED) or len(text) > _YAML_LETTERS:
        return None
    import yaml

    try:
        with ForeignErrorTranslator(lambda got: SpecError("it is not YAML.", got=got)):
            tree = yaml.safe_load(text)
            check_nesting_depth(tree, most=len(text))
    except SpecError:
        return None
    return _recognize_mapping_format(tree, format)


def _recognize_mapping_format(tree: Any, format: ConfigFormat | None) -> ParsedConfig | None:
    """Returns a config of Accelerate or DeepSpeed, recognised by its keys, or None."""
    if not isinstance(tree, Mapping) or not tree:
        return None
    keyed = {str(key): value for key, value in cast(Mapping[Any, Any], tree).items()}
    if format is not None:
        return format, keyed, []
    if _ACCELERATE & keyed.keys():
        return ConfigFormat.ACCELERATE, keyed, []
    if _DEEPSPEED & keyed.keys():
        return ConfigFormat.DEEPSPEED, keyed, []
    return None


def _with_plain_values(source: ParsedConfig, text: str, *, name: str) -> ParsedConfig:
    """Returns `source` with JSON types only. Raises SpecError for values that no run.toml can have."""
    format, tree, notes = source
    try:
        check_nesting_depth(tree, most=len(text))
        check_integer_sizes(tree)
        plain = {key: _plain_json_value(value) for key, value in tree.items()}
        json.dumps(plain, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError as error:
        raise SpecError(f"{name} has values that no run has.", got=str(error)) from error
    if len(list(iterate_leaves(plain))) > _MOST_KEYS:
        raise SpecError(f"{name} is not a config.", got=f"more than {_MOST_KEYS:,} keys")
    return format, plain, notes


def _plain_json_value(value: Any) -> Any:
    """Converts keys, and values that are not JSON types, to text: YAML allows any type."""
    if isinstance(value, Mapping):
        return {str(key): _plain_json_value(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple | set):
        return [_plain_json_value(inner) for inner in cast(Iterable[Any], value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


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
        return ConfigFormat.TORCHTITAN, tree, []
    return None


def _try_parse_python(text: str, format: ConfigFormat | None) -> ParsedConfig | None:
    if format not in (None, ConfigFormat.FSDP, ConfigFormat.LIGHTNING):
        return None
    try:
        return _settings_from_python_calls(PythonSource(text), format)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last if the parser's stack overflows
        return None


def _settings_from_python_calls(source: PythonSource, format: ConfigFormat | None) -> ParsedConfig | None:
    if format in (None, ConfigFormat.LIGHTNING):
        strategy, host = source.fullest_call(LIGHTNING_STRATEGIES), source.fullest_call(LIGHTNING_HOSTS)
        if strategy or (host and {"strategy", "devices", "precision"} & host[1].keys()):
            tree = dict(host[1]) if host else {}
            if strategy and not isinstance(tree.get("strategy"), dict):
                tree["strategy"] = strategy[1] or strategy[0]
            return ConfigFormat.LIGHTNING, tree, []
    call = source.fullest_call(FSDP_CALLS) if format in (None, ConfigFormat.FSDP) else None
    if call is not None:
        name, arguments, others = call
        more = f"{others} other calls were not read: the one with the most arguments was, {name}(…)"
        return ConfigFormat.FSDP, arguments, [more] if others else []
    options = source.find_options_dict()
    return (ConfigFormat.FSDP, options, []) if options and format is not ConfigFormat.LIGHTNING else None


def _syntax_error_text(text: str, name: str) -> str | None:
    """Returns the parser's error if `name` ends in .json, .toml or .py and `text` is not that; else None."""
    try:
        if name.endswith(".json"):
            parse_json(text)
        elif name.endswith(".toml"):
            parse_toml(text)
        elif name.endswith(".py"):
            PythonSource(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None


def _first_nonblank_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 80 else f"{line[:80]}…"
