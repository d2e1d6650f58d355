"""The settings of a run as one flat list of keys, and those in which runs differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from fullshard.spec.run import Run

_OWN = "run.dir"  # differs between any two runs, and says nothing


def list_settings(run: Run) -> dict[str, str]:
    """Returns the text of every setting by its dotted key, as in `--set`."""
    return {key: text for key, text in _flatten(run.model_dump(mode="json"), "") if key != _OWN}


def changed_settings(run: Run) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of the settings that are not at their defaults."""
    defaults = list_settings(Run())
    found = list_settings(run).items()
    return [(key, text, defaults.get(key, "")) for key, text in found if text != defaults.get(key)]


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns (key, value of each run) of the settings in which the runs differ. Absent values are ""."""
    each = [list_settings(run) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    rows = [(key, [settings.get(key, "") for settings in each]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast(Mapping[str, Any], value).items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        yield key, value
    else:
        yield key, json.dumps(value)
