"""Imports of packages that bring torchao along."""

import importlib
import logging
from types import ModuleType

# transformers and peft import torchao, if it is installed, whatever they are asked for. torchao warns of its
# kernels for other torch builds, and torch warns of torchao's enums.
_WARN = ("torchao", "torch.utils._pytree")


def import_quietly(name: str) -> ModuleType:
    """Imports a module without the warnings of torchao, which concern nothing that is used here."""
    loggers = [logging.getLogger(one) for one in _WARN]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        return importlib.import_module(name)
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
