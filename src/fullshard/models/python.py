"""Builds models from the user's own function ([model] python)."""

from torch import nn

from fullshard.errors import SpecError
from fullshard.models.meta_init import without_parameters
from fullshard.spec.dotted import import_object
from fullshard.spec.model_section import PythonModel


def python_model(section: PythonModel) -> nn.Module:
    """Builds the module that the factory returns for `options`, with parameters on the meta device.

    Raises SpecError for a factory that does not exist, does not accept the options, or does not return a
    module.
    """
    factory = import_object(section.python, key="model.python")
    try:
        model = without_parameters(lambda: factory(**section.options))
    except TypeError as error:
        raise SpecError(
            f"{section.python} cannot be called so.",
            got=f"{error}; model.options = {section.options}",
            fix="model.options with the factory's own keyword arguments",
        ) from error
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(
            f"{section.python} made no module.",
            got=type(model).__name__,
            why="model.python is a function, or a class, that returns a torch.nn.Module",
        )
    return model
