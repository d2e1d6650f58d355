"""Python's garbage collector, and the half a million permanent objects of torch's modules."""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def gc_disabled() -> Generator[None]:
    """Disables garbage collection inside the block: for imports, and for code that creates little garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def gc_frozen_imports() -> Generator[None]:
    """Disables collection inside the block, and exempts all objects alive at its end from later collections.

    Searching them for cycles would take a second, also when the process ends (unless it has loaded a nanobind
    library, see `_unfreeze_for_nanobind`). Only for libraries, before a user's modules are imported, because
    that search closes files that user code leaves open.
    """
    with gc_disabled():
        yield
        gc.freeze()
    atexit.unregister(_unfreeze_for_nanobind)
    atexit.register(_unfreeze_for_nanobind)


def _unfreeze_for_nanobind() -> None:
    """Lets the interpreter free all objects at exit if a nanobind library (triton) is loaded.

    Such a library prints a line for each of its instances, types and functions that outlives the interpreter.
    """
    if any(_is_of_nanobind(module) for module in [*sys.modules.values()]):
        gc.unfreeze()


def _is_of_nanobind(module: object) -> bool:
    """Returns whether this is an extension module with a class or function of a nanobind type."""
    if not isinstance(module, ModuleType) or str(vars(module).get("__file__")).endswith(".py"):
        return False
    return any(getattr(type(value), "__module__", None) == "nanobind" for value in [*vars(module).values()])
