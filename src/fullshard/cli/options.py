"""Arguments and options that several commands share."""

import math
from pathlib import Path
from typing import Annotated

import typer


def require_positive_number(value: float | None) -> float | None:
    """Returns an option's number. Raises BadParameter for NaN, infinity, 0 and negative numbers."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a finite number over 0")
    return value


def complete_keys(incomplete: str) -> list[str]:
    """Returns the keys of a run that begin with `incomplete`, for the shell's completion of `--set`."""
    from fullshard.spec.run import Run
    from fullshard.spec.value import iterate_dotted_field_names

    return [f"{key}=" for key in iterate_dotted_field_names(Run) if key.startswith(incomplete)]


def complete_presets(incomplete: str) -> list[str]:
    """Returns the names of presets that begin with `incomplete`. Without one, the shell completes files."""
    from fullshard.spec.presets import read_presets

    return [one.name for one in read_presets() if one.name.startswith(incomplete)]


RunPath = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="The run; without it, all keys have their defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key of the run, such as train.steps=10; may be repeated.",
        autocompletion=complete_keys,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="Accept only checkpoints that are signed with this key.")
]
