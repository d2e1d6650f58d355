"""`convert`: turns a config of another tool into a Run, with a verdict on each key."""

import math
from collections.abc import Callable
from typing import Any, cast

from fullshard.convert.accelerate import read_accelerate
from fullshard.convert.deepspeed import read_deepspeed
from fullshard.convert.fsdp import read_fsdp_alone, read_lightning
from fullshard.convert.reader import ConfigReader, Format, KeyResult, KeyVerdict
from fullshard.convert.source import read_source
from fullshard.convert.torchtitan import read_torchtitan
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.toml_file import toml_text
from fullshard.spec.value import FrozenModel

_READERS: dict[Format, Callable[[ConfigReader], None]] = {
    Format.ACCELERATE: read_accelerate,
    Format.DEEPSPEED: read_deepspeed,
    Format.FSDP: read_fsdp_alone,
    Format.LIGHTNING: read_lightning,
    Format.TORCHTITAN: read_torchtitan,
}


class Conversion(FrozenModel):
    """A converted config.

    name: file name of the config
    said: the verdict on each key, in the order of the config
    notes: remarks that do not belong to a single key
    settings: values by dotted key of run.toml
    origins: for each of `settings`, the key of the config or the reason that it comes from
    run: the Run with these `settings`
    """

    name: str
    format: Format
    said: tuple[KeyResult, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]
    origins: dict[str, str]
    run: Run

    def run_toml(self) -> str:
        """Returns the text of a run.toml that loads as `run`."""
        head = f"From {self.name} ({self.format}), by fullshard convert. What is not here has its default."
        return toml_text(
            _nested(self.settings), head=head, comment=lambda path: self.origins.get(".".join(path))
        )

    def count(self, verdict: KeyVerdict) -> int:
        """Returns the number of keys with this verdict."""
        return sum(one.verdict is verdict for one in self.said)


def convert(text: str, *, name: str, format: Format | None = None, ranks: int | None = None) -> Conversion:
    """Converts the config `text` of a file called `name`.

    format: detected from the content if None
    ranks: number of ranks that the config is for, if the file does not contain it

    Raises SpecError for text of no known format, for keys that contradict each other, and for values that a
    run.toml does not allow.
    """
    found, tree, notes = read_source(text, name=name, format=format)
    reading = ConfigReader(tree, ranks=ranks)
    _require_numbers(reading)
    reading.notes.extend(notes)
    _READERS[found](reading)
    order = ("run", "model", "data", "train")  # other sections follow by name
    targets = sorted(reading.settings, key=lambda target: _place(target, order))
    settings = {target: reading.settings[target] for target in targets}
    run = Run.parse(_nested(settings), source=f"what {name} says")
    return Conversion(
        name=name,
        format=found,
        said=tuple(reading.said[key] for key in reading.leaves),
        notes=tuple(reading.notes),
        settings=settings,
        origins=reading.origins,
        run=run,
    )


def _require_numbers(reading: ConfigReader) -> None:
    """Raises SpecError for NaN, which JSON, YAML and TOML can express."""
    for key, value in reading.leaves.items():
        for one in cast(list[Any], value) if isinstance(value, list) else [value]:
            if isinstance(one, float) and math.isnan(one):
                raise SpecError(f"{key} is not valid.", got=repr(value), fix="a number")


def _place(target: str, order: tuple[str, ...]) -> tuple[int, str]:
    section, table = target.partition(".")[0], target.rpartition(".")[0]
    return (order.index(section) if section in order else len(order), table)


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as nested tables: `{"train.steps": 3}` -> `{"train": {"steps": 3}}`."""
    tree: dict[str, Any] = {}
    for target, value in settings.items():
        *path, key = target.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return tree
