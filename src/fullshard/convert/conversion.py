"""`convert_config`: turns a config of another tool into a Run, with a verdict on each key."""

import math
from collections.abc import Callable
from typing import Any, cast

from fullshard.convert.accelerate import convert_accelerate
from fullshard.convert.deepspeed import convert_deepspeed
from fullshard.convert.fsdp import convert_fsdp, convert_lightning
from fullshard.convert.reader import ConfigFormat, ConversionState, KeyResult
from fullshard.convert.source import parse_config
from fullshard.convert.torchtitan import convert_torchtitan
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.toml_file import toml_text
from fullshard.spec.value import FrozenModel

_READERS: dict[ConfigFormat, Callable[[ConversionState], None]] = {
    ConfigFormat.ACCELERATE: convert_accelerate,
    ConfigFormat.DEEPSPEED: convert_deepspeed,
    ConfigFormat.FSDP: convert_fsdp,
    ConfigFormat.LIGHTNING: convert_lightning,
    ConfigFormat.TORCHTITAN: convert_torchtitan,
}


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

    def run_toml_text(self) -> str:
        """Returns the text of a run.toml that loads as `run`."""
        head = f"From {self.name} ({self.format}), by fullshard convert. What is not here has its default."
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
    found, tree, notes = parse_config(text, name=name, format=format)
    state = ConversionState(tree, ranks=ranks)
    _check_no_nan(state)
    state.notes.extend(notes)
    _READERS[found](state)
    settings = {target: state.settings[target] for target in sorted(state.settings, key=_setting_sort_key)}
    run = Run.parse(_nested_tables(settings), source=f"what {name} says")
    return Conversion(
        name=name,
        format=found,
        key_results=tuple(state.key_results[key] for key in state.leaves),
        notes=tuple(state.notes),
        settings=settings,
        origins=state.origins,
        run=run,
    )


def _check_no_nan(state: ConversionState) -> None:
    """Raises SpecError for NaN, which JSON, YAML and TOML can express."""
    for key, value in state.leaves.items():
        for one in cast(list[Any], value) if isinstance(value, list) else [value]:
            if isinstance(one, float) and math.isnan(one):
                raise SpecError(f"{key} is not valid.", got=repr(value), fix="a number")


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
