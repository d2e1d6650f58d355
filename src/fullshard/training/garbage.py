"""Garbage collection between steps, in the same steps on all ranks.

Python's collector runs when enough objects have been created. That happens at another moment on each rank,
and all others wait for the rank that collects. So it is off while a run trains.
"""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

# Steps between collections of each of the older generations. Young objects are collected in every step.
_EVERY = {1: 50, 2: 1000}


@contextmanager
def collect_garbage_between_steps() -> Generator[Callable[[int], None]]:
    """Context without automatic garbage collection. Yields a function to call with each step's number.

    Does nothing if the program has disabled the collector itself.
    """
    if not gc.isenabled():
        yield lambda step: None
        return
    gc.disable()
    enable = gc.enable  # modules may be gone when the interpreter ends within the context
    try:
        yield _collect
    finally:
        enable()


def _collect(step: int) -> None:
    gc.collect(max((generation for generation, every in _EVERY.items() if step % every == 0), default=0))
