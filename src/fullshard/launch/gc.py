"""Pauses of Python's garbage collector, which is slow on the half a million permanent objects of torch."""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


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
    # Triton's nanobind prints a line for each of its objects that the interpreter does not free at exit.
    atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else None)
