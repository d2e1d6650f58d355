"""Python's garbage collector, and the half a million objects of torch's modules, which are no garbage."""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def gc_disabled() -> Generator[None]:
    """Nothing is collected within: for imports, and for what makes little garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def gc_frozen_imports() -> Generator[None]:
    """Also, what there is at its end is never searched for cycles, nor when the process ends, which would
    take a second. Only for libraries, before a user's modules are there: files that those leave open are
    closed by that search.

    A process that has loaded a nanobind library (triton, which CUDA builds of torch import) takes that
    second when it ends: see `_unfreeze_for_nanobind`.
    """
    with gc_disabled():
        yield
        gc.freeze()
    atexit.unregister(_unfreeze_for_nanobind)
    atexit.register(_unfreeze_for_nanobind)


def _unfreeze_for_nanobind() -> None:
    """Lets the interpreter free all objects as it ends, if a library checks that it does.

    A nanobind library prints a line for every instance, type and function of its own that outlives the
    interpreter. Types lie in cycles, so those that were frozen would all be reported.
    """
    if any(_is_of_nanobind(module) for module in [*sys.modules.values()]):
        gc.unfreeze()


def _is_of_nanobind(module: object) -> bool:
    """True for an extension module with a class or function whose own type is one of nanobind's."""
    if not isinstance(module, ModuleType) or str(vars(module).get("__file__")).endswith(".py"):
        return False
    return any(getattr(type(value), "__module__", None) == "nanobind" for value in [*vars(module).values()])
