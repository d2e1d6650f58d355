"""Imports packages without the warnings of torchao, which they import."""

import importlib
import logging
from types import ModuleType

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
