"""Importing the functions and classes that a run.toml names as `package.module:name`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError


def import_callable(dotted: str, *, key: str) -> Callable[..., Any]:
    """Imports the callable `dotted` (`package.module:name`) from a package or the working directory.

    Raises SpecError, which names the run's setting `key`, if no such callable exists.
    """
    module_name, _, name = dotted.partition(":")
    if not module_name or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise SpecError(
            f"{key} = {dotted!r} does not exist.",
            why="it is package.module:name",
            fix=f'{key} = "mypackage.mymodule:myfunction"',
        )
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # the ranks, started by `python -m`, have it too
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"{key} = {dotted!r} cannot be imported.",
            got=str(error),
            fix="install its package, or start where the module lies",
        ) from error
    found = getattr(module, name, None)
    if callable(found):
        return found
    there = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
    raise SpecError(
        f"{key} = {dotted!r} is not a function.",
        got=f"{module_name} has no {name}" if found is None else f"{name} is {type(found).__name__}",
        fix=f"one of {', '.join(there[:6])}" if there else None,
    )
