"""`convert_config`: turns a config of another tool into a Run, with a verdict on each key."""

import math
from collections.abc import Callable
from typing import Any, cast

from fullshard.convert.accelerate import convert_accelerate
from fullshard.convert.deepspeed import convert_deepspeed
from fullshard.convert.reader import (
    AUTO,
    ConfigFormat,
    ConversionState,
    KeyResult,
    KeyVerdict,
    default_run_setting,
)
from fullshard.convert.source import parse_config
from fullshard.convert.torchtitan import convert_torchtitan
from fullshard.convert.trainer import convert_axolotl, convert_trainer
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.toml_file import toml_text
from fullshard.spec.value import FrozenModel

_READERS: dict[ConfigFormat, Callable[[ConversionState], None]] = {
    ConfigFormat.ACCELERATE: convert_accelerate,
    ConfigFormat.AXOLOTL: convert_axolotl,
    ConfigFormat.DEEPSPEED: convert_deepspeed,
    ConfigFormat.TORCHTITAN: convert_torchtitan,
    ConfigFormat.TRAINER: convert_trainer,
}


# Settings that say what is trained on what, by section, and settings of these sections that do not say it.
_WHAT_IS_TRAINED = {"model": 'hf = "…"', "data": 'source = "…"'}
_SIZES_OF_SEQUENCES = (
    "data.sequence_length",
    "data.packing",
    "data.validation_fraction",
    "model.max_sequence",
)


class Conversion(FrozenModel):
    """A converted config.

    name: file name of the config
    key_results: the verdict on each key, in the order of the config
    notes: remarks that do not belong to a single key
    settings: values by dotted key of run.toml
    origins: for each of `settings`, the key of the config or the reason that it comes from
    run: the Run with these `settings`
    """

    name: str
    format: ConfigFormat
    key_results: tuple[KeyResult, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]
    origins: dict[str, str]
    run: Run

    @property
    def lost_keys(self) -> tuple[str, ...]:
        """Keys that request a strategy, a precision or a way to train which `run` does not have."""
        return tuple(one.key for one in self.key_results if one.is_lost)

    def run_toml_text(self) -> str:
        """Returns the text of a run.toml that loads as `run`."""
        head = f"From {self.name} ({self.format}), by fullshard convert. What is not here has its default."
        lost = (f"\nLOST: {one.key} = {one.value!r}: {one.why}" for one in self.key_results if one.is_lost)
        head += "".join(lost)
        tables = _nested_tables(self.settings)
        return toml_text(tables, head=head, comment=lambda path: self.origins.get(".".join(path)))


def convert_config(
    text: str, *, name: str, format: ConfigFormat | None = None, ranks: int | None = None
) -> Conversion:
    """Converts the config `text` of a file called `name`.

    format: detected from the content if None
    ranks: number of ranks that the config is for, if the file does not contain it

    Raises SpecError for text of no known format, for keys that contradict each other, and for values that a
    run.toml does not allow.
    """
    found, tree = parse_config(text, name=name, format=format)
    state = ConversionState(tree, ranks=ranks)
    _check_no_nan(state)
    _READERS[found](state)
    _keep_fp8_possible(state)
    _extend_positions_to_data(state)
    _note_default_model_and_data(state)
    settings = {target: state.settings[target] for target in sorted(state.settings, key=_setting_sort_key)}
    run = Run.parse(_nested_tables(settings), source=f"what {name} says")
    return Conversion(
        name=name,
        format=found,
        key_results=tuple(_final_key_result(state, state.key_results[key]) for key in state.leaves),
        notes=tuple(state.notes),
        settings=settings,
        origins={key: state.original_names.get(origin, origin) for key, origin in state.origins.items()},
        run=run,
    )


def _check_no_nan(state: ConversionState) -> None:
    """Raises SpecError for NaN, which JSON, YAML and TOML can express."""
    for key, value in state.leaves.items():
        for one in cast(list[Any], value) if isinstance(value, list) else [value]:
            if isinstance(one, float) and math.isnan(one):
                raise SpecError(f"{key} is not valid.", got=repr(value), fix="a number")


def _final_key_result(state: ConversionState, result: KeyResult) -> KeyResult:
    """Returns `result` with the key's name in the config, and for an open value, the one that counts here."""
    changes = {"key": state.original_names.get(result.key, result.key)}
    target = result.misses
    if result.verdict is KeyVerdict.OPEN:
        source = "a trainer fills it in" if result.value == AUTO else "a variable"
        default = default_run_setting(target)
        if target in state.settings:
            here = f"{target} = {state.settings[target]!r} here, from {state.origins[target]}"
            if state.origins[target] in state.leaves:  # another key has the value
                changes["misses"] = ""
        elif default in (None, AUTO):
            here = f"{target} is left open here too"
        else:
            here = f"{target} = {default!r} here, its default"
        changes["why"] = f"{source}; {here}"
    return result.model_copy(update=changes)


def _keep_fp8_possible(state: ConversionState) -> None:
    """Changes fp8 with a scale per tensor, which excludes offload and hpZ, to a scale per row."""
    offloads = state.settings.get("offload.tier", "none") != "none"
    hpz = "sharding.reshard_after_forward" in state.settings
    if state.settings.get("precision.mode") == "fp8" and (offloads or hpz):
        state.settings["precision.mode"] = "fp8_rowwise"
        state.notes.append('precision.mode = "fp8_rowwise": "fp8" goes with neither offload nor hpZ')


def _extend_positions_to_data(state: ConversionState) -> None:
    """Raises `model.max_sequence`, the positions of the reference decoder, to the length of the sequences."""
    length = state.settings.get("data.sequence_length")
    most = state.settings.get("model.max_sequence", default_run_setting("model.max_sequence"))
    if isinstance(length, int) and length > most and "model.hf" not in state.settings:
        state.settings["model.max_sequence"] = length
        state.origins["model.max_sequence"] = state.origins["data.sequence_length"]


def _note_default_model_and_data(state: ConversionState) -> None:
    """Adds a note if the config does not say what to train, or on what: run.toml then has the defaults."""
    given = {target.partition(".")[0] for target in state.settings if target not in _SIZES_OF_SEQUENCES}
    missing = [f"[{section}] {key}" for section, key in _WHAT_IS_TRAINED.items() if section not in given]
    if missing:
        keys = " and ".join(missing)
        state.notes.append(f"what is trained is not in the config, so run.toml has the default: set {keys}")


def _setting_sort_key(target: str) -> tuple[int, str]:
    order = ("run", "model", "data", "train")  # other sections follow by name
    section, table = target.partition(".")[0], target.rpartition(".")[0]
    return (order.index(section) if section in order else len(order), table)


def _nested_tables(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as nested tables: `{"train.steps": 3}` -> `{"train": {"steps": 3}}`."""
    tree: dict[str, Any] = {}
    for target, value in settings.items():
        *path, key = target.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return tree
