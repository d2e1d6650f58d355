"""Numbers on the command line."""

import math

import typer


def positive(value: float | None) -> float | None:
    """Returns an option's number. Raises BadParameter for NaN, infinity, 0 and negative numbers."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a finite number over 0")
    return value
