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


RunPath = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="The run; without it, all keys have their defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Set one key of the run, such as train.steps=10; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="Accept only checkpoints that are signed with this key.")
]
