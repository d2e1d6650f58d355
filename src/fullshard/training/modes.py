"""The training and evaluation modes of a model's modules, which the user may have set one by one."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torch import nn


def module_modes(model: nn.Module) -> dict[nn.Module, bool]:
    """Returns each module's `training`. A module in evaluation mode within a training model stays frozen."""
    return {module: module.training for module in model.modules()}


def restore_modes(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Puts `model` back into the modes of `module_modes`, by its own `train`, which may do more than that."""
    model.train(modes[model])
    for module, training in modes.items():
        if module.training is not training:
            module.training = training


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Context in which `model` is in evaluation mode. Afterwards each module has its own mode again."""
    modes = module_modes(model)
    model.eval()
    try:
        yield
    finally:
        restore_modes(model, modes)
