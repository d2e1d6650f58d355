"""`convert_config`: parses a config of another tool and turns it into a Run, with a verdict on each key."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fullshard.convert import rules
from fullshard.convert.deepspeed import convert_deepspeed
from fullshard.convert.huggingface import convert_accelerate, convert_axolotl, convert_trainer
from fullshard.convert.torchtitan import convert_torchtitan
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel
from fullshard.system import small_files

_READERS: dict[rules.ConfigFormat, Callable[[rules.ConversionState], None]] = {
    rules.ConfigFormat.ACCELERATE: convert_accelerate,
    rules.ConfigFormat.AXOLOTL: convert_axolotl,
    rules.ConfigFormat.DEEPSPEED: convert_deepspeed,
    rules.ConfigFormat.TORCHTITAN: convert_torchtitan,
    rules.ConfigFormat.TRAINER: convert_trainer,
}


# Settings of which one says what is trained, or on what, and how to write it.
_WHAT_IS_TRAINED = {
    '[model] hf = "…"': {"model.hf", "model.d_model"},
    '[data] source = "…"': {"data.source", "data.sources"},
}
_MOST_KEYS = 5_000
_YAML_LETTERS = 1 << 17  # the YAML parser takes about one second for this many characters
_FORMATS = small_files.read_toml(Path(__file__).with_name("formats.toml"))
_FORMAT_KEYS = {rules.ConfigFormat(name): {*keys.split()} for name, keys in _FORMATS["keys"].items()}
_DEEPSPEED = {*_FORMATS["keys_of_deepspeed_alone"].split()}
_MAPPING_FORMATS = (None, *_FORMAT_KEYS)
_TORCHTITAN = {"job", "training", "parallelism", "activation_checkpoint", "lr_scheduler", "metrics"}
_FORMS = "an Accelerate, axolotl or Trainer YAML, a DeepSpeed JSON, or a torchtitan TOML"
# Strings, and comments of text that is nearly JSON (DeepSpeed reads them, as Hjson). What is not closed ends
# with the text, so that no part is searched twice.
_STRING = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'
_STRING_OR_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)
_PLACEHOLDER = re.compile(r"\$\{|\{\{|\{%|\$\w+\Z")

ParsedConfig = tuple[rules.ConfigFormat, dict[str, Any]]


class Conversion(FrozenModel):
    """A converted config.

    name: file name of the config
    key_results: the verdict on each key, in the order of the config
    decisions: what the config leaves to the user, the most important first
    notes: remarks that do not belong to a single key
    settings: values by dotted key of run.toml
    origins: for each of `settings`, the key of the config or the reason that it comes from
    run: the Run with these `settings`
    """

    name: str
    format: rules.ConfigFormat
    key_results: tuple[rules.KeyResult, ...]
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]
    origins: dict[str, str]
    run: Run

    @property
    def lost_keys(self) -> tuple[str, ...]:
        """Unknown keys, and keys for a strategy, a precision or a way to train that `run` does not have."""
        return tuple(one.key for one in self.key_results if one.is_lost)

    def run_toml_text(self) -> str:
        """Returns the text of a run.toml that loads as `run`."""
        head = f"From {self.name} ({self.format}), by fullshard convert. What is not here has its default."
        lost = (f"\nLOST: {one.key} = {one.value!r}: {one.why}" for one in self.key_results if one.is_lost)
        head += "".join(lost) + "".join(f"\nDECIDE: {one}" for one in self.decisions)
        tables = nested_tables(self.settings)
        return small_files.toml_text(tables, head=head, comment=lambda path: self.origins.get(".".join(path)))


def convert_config(
    text: str, *, name: str, format: rules.ConfigFormat | None = None, ranks: int | None = None
) -> Conversion:
    """Converts the config `text` of a file called `name`.

    format: detected from the content if None
    ranks: number of ranks that the config is for, if the file does not contain it

    Raises SpecError for text of no known format, for keys that contradict each other, and for values that a
    run.toml does not allow.
    """
    found, tree = parse_config(text, name=name, format=format)
    state = rules.ConversionState(tree, ranks=ranks)
    _READERS[found](state)
    offloads = state.settings.get("offload.tier", "none") != "none"
    if state.settings.get("precision.mode") == "fp8" and offloads:
        state.settings["precision.mode"] = "fp8_rowwise"
        state.notes.append('precision.mode = "fp8_rowwise": "fp8" does not go with offload')
    length = state.settings.get("data.sequence_length")
    most = state.settings.get("model.max_sequence", rules.default_run_setting("model.max_sequence"))
    if isinstance(length, int) and length > most and "model.hf" not in state.settings:
        state.settings["model.max_sequence"] = length
        state.origins["model.max_sequence"] = state.origins["data.sequence_length"]
    for target in ("sharding.tensor_parallel", "sharding.context_parallel", "sharding.expert_parallel"):
        if all(one.misses != target for one in state.key_results.values()):  # auto stays open
            state.infer_setting(target, 1, origin=f"{found} has none by default")
    missing = [text for text, targets in _WHAT_IS_TRAINED.items() if not targets & state.settings.keys()]
    if missing:  # run.toml has the default
        keys = " and ".join(missing)
        state.decisions.append(f"what is trained, which is the default until you set {keys}")
    if state.settings.get("schedule.kind", "constant") != "constant":
        state.notes.append(
            "rates may be a step apart: here step warmup_steps has the highest, and the last step the lowest"
        )
    settings = {target: state.settings[target] for target in sorted(state.settings, key=_setting_sort_key)}
    run = Run.parse(nested_tables(settings), source=f"what {name} says")
    return Conversion(
        name=name,
        format=found,
        key_results=tuple(
            _with_file_key_and_auto_explained(state, state.key_results[key]) for key in state.leaves
        ),
        decisions=tuple(state.decisions),
        notes=tuple(state.notes),
        settings=settings,
        origins={key: state.original_names.get(origin, origin) for key, origin in state.origins.items()},
        run=run,
    )


def _with_file_key_and_auto_explained(
    state: rules.ConversionState, result: rules.KeyResult
) -> rules.KeyResult:
    """Returns `result` with the key's name in the config, and for an open value, the one that counts here."""
    changes = {"key": state.original_names.get(result.key, result.key)}
    target = result.misses
    if result.verdict is rules.KeyVerdict.OPEN:
        default = rules.default_run_setting(target)
        if target in state.settings:
            here = f"{target} = {state.settings[target]!r} here, from {state.origins[target]}"
            if state.origins[target] in state.leaves:  # another key has the value
                changes["misses"] = ""
        elif default in (None, rules.AUTO):
            here = f"{target} is left open here too"
        else:
            here = f"{target} = {default!r} here, its default"
        changes["why"] = f"a trainer fills it in; {here}"
    return result.model_copy(update=changes)


def _setting_sort_key(target: str) -> tuple[int, str]:
    order = ("run", "model", "data", "train")  # other sections follow by name
    section, table = target.partition(".")[0], target.rpartition(".")[0]
    return (order.index(section) if section in order else len(order), table)


def nested_tables(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as nested tables: `{"train.steps": 3}` -> `{"train": {"steps": 3}}`."""
    tree: dict[str, Any] = {}
    for target, value in settings.items():
        *path, key = target.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return tree


def parse_config(text: str, *, name: str, format: rules.ConfigFormat | None) -> ParsedConfig:
    """Returns (format, nested settings) of `text`. Raises SpecError for text that is not a usable config."""
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
    if line := next((line for line in text.splitlines() if _PLACEHOLDER.search(line)), None):
        raise _unfilled_template_error(name, _first_nonblank_line(line))
    if error := _parser_error_text(text, name):
        raise SpecError(f"{name} cannot be read.", got=error, fix="correct it there, or another suffix")
    wanted = f"no config of {format}" if format else "of no format that is known here"
    raise SpecError(
        f"{name} is {wanted}.",
        got=_first_nonblank_line(text),
        fix=f"{_FORMS}; --from says which it is meant to be",
    )


def _try_parse_json(text: str, format: rules.ConfigFormat | None) -> ParsedConfig | None:
    if format not in _MAPPING_FORMATS:
        return None
    for load in (small_files.parse_json, _load_json_with_comments):
        with suppress(ValueError):
            return _recognize_mapping_format(load(text), format)
    return None


def _load_json_with_comments(text: str) -> Any:
    return small_files.parse_json(_STRING_OR_TRAILING_COMMA.sub(r"\1", _STRING_OR_COMMENT.sub(r"\1", text)))


def _try_parse_yaml(text: str, format: rules.ConfigFormat | None) -> ParsedConfig | None:
    if format not in _MAPPING_FORMATS:
        return None
    tree = None
    with suppress(ValueError):
        tree = _load_yaml(text)
    found = _recognize_mapping_format(tree, format)
    # DeepSpeed's are JSON; a YAML with one of its common names, such as `optimizer`, is another tool's.
    if (
        format is None
        and found
        and found[0] is rules.ConfigFormat.DEEPSPEED
        and not _DEEPSPEED & found[1].keys()
    ):
        return None
    return found


def _load_yaml(text: str) -> Any:
    """Parses YAML. Raises ValueError for other or long text, and for references that expand."""
    import yaml

    if len(text) > _YAML_LETTERS:
        raise ValueError(f"it has more than {_YAML_LETTERS:,} characters")
    with small_files.ForeignErrorTranslator(
        lambda got: ValueError(got.replace('in "<unicode string>",', "at"))
    ):
        tree: Any = yaml.safe_load(text)
        small_files.check_nesting_depth(tree, most_per_level=len(text))
    return tree


def _recognize_mapping_format(tree: Any, format: rules.ConfigFormat | None) -> ParsedConfig | None:
    if not isinstance(tree, Mapping) or not tree:
        return None
    keyed = {str(key): value for key, value in cast(Mapping[Any, Any], tree).items()}
    found = format or next((one for one, keys in _FORMAT_KEYS.items() if keys & keyed.keys()), None)
    return None if found is None else (found, keyed)


def _with_plain_values(source: ParsedConfig, text: str, *, name: str) -> ParsedConfig:
    """Returns `source` with JSON types only. Raises SpecError for placeholders and other unusable values."""
    format, tree = source
    try:
        small_files.check_nesting_depth(tree, most_per_level=len(text))
        small_files.check_integer_sizes(tree)
        plain = {key: _plain_json_value(value) for key, value in tree.items()}
        json.dumps(plain, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError as error:
        raise SpecError(f"{name} has values that no run has.", got=str(error)) from error
    leaves = list(rules.iterate_leaves(plain))
    if len(leaves) > _MOST_KEYS:
        raise SpecError(f"{name} is not a config.", got=f"more than {_MOST_KEYS:,} keys")
    for key, value in leaves:
        for one in cast(list[Any], value) if isinstance(value, list) else [value]:
            if isinstance(one, float) and math.isnan(one):  # which JSON, YAML and TOML can express
                raise SpecError(f"{key} is not valid.", got=repr(value), fix="a number")
            # A chat template has such marks itself.
            if isinstance(one, str) and "template" not in key and _PLACEHOLDER.search(one):
                raise _unfilled_template_error(name, _first_nonblank_line(f"{key} = {one}"))
    return format, plain


def _plain_json_value(value: Any) -> Any:
    """Converts keys, and values that are not JSON types, to text: YAML allows any type."""
    if isinstance(value, Mapping):
        return {str(key): _plain_json_value(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple | set):
        return [_plain_json_value(inner) for inner in cast(Iterable[Any], value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _unfilled_template_error(name: str, got: str) -> SpecError:
    return SpecError(f"{name} is a template.", got=got, fix="fill in its placeholders first")


def _try_parse_torchtitan_toml(text: str, format: rules.ConfigFormat | None) -> ParsedConfig | None:
    if format not in (None, rules.ConfigFormat.TORCHTITAN):
        return None
    try:
        tree = small_files.parse_toml(text)
    except ValueError:
        return None
    sections = {key for key, value in tree.items() if isinstance(value, dict)}
    if format is None and sections and sections <= Run.model_fields.keys() and not sections & {"training"}:
        raise SpecError(
            "this is a run.toml already.", got=f"[{'], ['.join(sections)}]", fix="fullshard train"
        )
    if format is not None or _TORCHTITAN & sections:
        return rules.ConfigFormat.TORCHTITAN, tree
    return None


def _parser_error_text(text: str, name: str) -> str | None:
    parsers = {".json": _load_json_with_comments, ".toml": small_files.parse_toml}
    parse = (parsers | dict.fromkeys((".yaml", ".yml"), _load_yaml)).get(Path(name).suffix)
    try:
        if parse is not None:
            parse(text)
    except (ValueError, RecursionError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None


def _first_nonblank_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 80 else f"{line[:80]}…"
