"""Pauses of Python's garbage collector, which is slow on the half a million permanent objects of torch."""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def disable_gc() -> Generator[None]:
    """Context without garbage collection, for imports and for code that creates little garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def freeze_imports_in_gc() -> Generator[None]:
    """Context without garbage collection. At its end, all living objects are exempt from later collections.

    A collection of these objects would take a second, also when the process ends. Use it only for imports of
    libraries, before a user's modules: the last collection closes files that user code leaves open.
    """
    with disable_gc():
        yield
        gc.freeze()
    atexit.unregister(_unfreeze_for_nanobind)
    atexit.register(_unfreeze_for_nanobind)


def _unfreeze_for_nanobind() -> None:
    """Undoes `gc.freeze` at exit if a library built with nanobind (triton) is loaded.

    Such a library prints a line for each of its objects that the interpreter does not free.
    """
    if any(_is_nanobind_module(module) for module in [*sys.modules.values()]):
        gc.unfreeze()


def _is_nanobind_module(module: object) -> bool:
    """Returns True for an extension module that contains a class or function of nanobind's types."""
    if not isinstance(module, ModuleType) or str(vars(module).get("__file__")).endswith(".py"):
        return False
    return any(getattr(type(value), "__module__", None) == "nanobind" for value in [*vars(module).values()])
