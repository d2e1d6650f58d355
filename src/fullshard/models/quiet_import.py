"""Imports packages that import torchao, without its warnings."""

import importlib
import logging
from types import ModuleType

# transformers and peft always import torchao if it is installed. torchao warns about its kernels for other
# torch builds, and torch warns about torchao's enums.
_WARN = ("torchao", "torch.utils._pytree")


def import_quietly(name: str) -> ModuleType:
    """Imports a module without torchao's warnings, which are irrelevant here."""
    loggers = [logging.getLogger(one) for one in _WARN]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        return importlib.import_module(name)
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
