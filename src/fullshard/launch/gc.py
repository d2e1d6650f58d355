"""Python's garbage collector, and the half a million objects of torch's modules, which are no garbage."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


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
    closed by that search."""
    with gc_disabled():
        yield
        gc.freeze()
