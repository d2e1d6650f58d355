"""Imports what a run.toml names as `package.module:name`, and packages without the warnings of torchao."""

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.errors import SpecError


def import_callable(dotted: str, *, key: str) -> Callable[..., Any]:
    """Imports the callable `dotted` (`package.module:name`) from a package or the working directory.

    Raises SpecError, which names the run's setting `key`, if no such callable exists, and if a module of the
    working directory has the name of an installed one.
    """
    module_name, _, name = dotted.partition(":")
    if not module_name or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise SpecError(
            f"{key} = {dotted!r} does not exist.",
            why="it is package.module:name",
            fix=f'{key} = "mypackage.mymodule:myfunction"',
        )
    try:
        module = import_named_module(module_name, setting=f"{key} = {dotted!r}")
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


def import_named_module(name: str, *, setting: str) -> ModuleType:
    """Imports the module `name` that `setting` names. Modules of the working directory come last.

    A file there, such as tokenize.py, thus does not replace a module of Python or of an installed package.
    Raises ImportError; SpecError if this hides the module that `setting` may mean.
    """
    append_working_directory_to_path(name)
    try:
        return importlib.import_module(name)
    finally:
        path = Path(*name.split("."))
        for package in [*path.parents][-2::-1]:  # without "."
            _check_own_file_was_imported(package, package / "__init__.py", setting=setting)
        for own in (path.with_suffix(".py"), path / "__init__.py"):
            _check_own_file_was_imported(path, own, setting=setting)


def append_working_directory_to_path(name: str) -> None:
    """Lets the module `name`, unless it is fullshard's, be of the working directory, after all other places.

    A run that names no module of its own thus imports nothing from there.
    """
    is_own = name.partition(".")[0] == "fullshard"
    if not is_own and str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))


def _check_own_file_was_imported(module: Path, own: Path, *, setting: str) -> None:
    """Raises SpecError if `module` (`package/name`) was imported from a file with other bytes than `own`."""
    name = ".".join(module.parts)
    if name not in sys.modules or not own.is_file():
        return
    imported = getattr(sys.modules[name], "__file__", None)
    if imported is None or Path(imported).read_bytes() != own.read_bytes():
        raise SpecError(
            f"{setting} may mean another module than is imported.",
            got=f"{imported or name + ' of Python itself'}, not {own.resolve()}",
            why="modules of Python and of installed packages come before those of the working directory",
            fix="another name for the file; or start elsewhere, to use the installed module",
        )


# transformers and peft always import torchao if it is installed. torchao warns about its kernels for other
# torch builds, and torch warns about torchao's enums.
_WARN = ("torchao", "torch.utils._pytree")


def import_quietly(name: str) -> ModuleType:
    """Imports the module `name`, without torchao's warnings, and returns it."""
    loggers = [logging.getLogger(one) for one in _WARN]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        return importlib.import_module(name)
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
