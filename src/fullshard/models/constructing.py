"""Modules that are constructed without their parameters, but with their buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_VALUES = "_constructed_values"
# A table of values that are not all the same is kept with the module up to this size.
_MOST_KEPT = 1 << 20

_Kept = float | NDArray[np.float64]


def without_parameters(construct: Callable[[], nn.Module]) -> nn.Module:
    """What `construct()` returns, with every parameter on the meta device and every buffer as computed.

    Constructors compute buffers (tables of rotary positions, masks, position numbers) that nothing could
    compute again later, and that no checkpoint holds; on the meta device they would be lost
    (transformers#45902). So only `torch.empty`, which parameters are made of, gives tensors without storage.
    A parameter that the constructor makes of values (ones, a temperature) gets these again when the model is
    initialised, unless its module has `reset_parameters`, and before `_init_weights` has its say.

    The same values on every rank: random numbers begin anew here. Whatever `construct` raises comes through.
    """
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        torch.manual_seed(0)
        model = construct()
    if isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # somebody's own function
        _let_go(model)
        setattr(model, "_init_weights", _with_constructed_values(getattr(model, "_init_weights", None)))  # noqa: B010
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Tensors that are made without values, and without a word on where, are on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func in (torch.empty, torch.empty_strided) and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def _let_go(model: nn.Module) -> None:
    """Every parameter on the meta device; ties stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                continue
            if id(parameter) not in replaced:
                data = torch.empty_like(parameter, device="meta")
                replaced[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced[id(parameter)]  # pyright: ignore[reportPrivateUsage]
            value = _kept(parameter.detach())
            if value is not None and not hasattr(module, "reset_parameters"):
                vars(module).setdefault(_VALUES, {})[key] = value


def _kept(value: Tensor) -> _Kept | None:
    """The value, in little memory and no tensor (a copy of the module may be made of fake ones); None where
    it takes more."""
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return float(value.flatten()[0].item())  # the one value of them all
    return value.double().numpy() if value.numel() <= _MOST_KEPT else None


def _with_constructed_values(then: Callable[[nn.Module], object] | None) -> Callable[[nn.Module], None]:
    """An initialiser of one module: the values that its constructor gave, then the model's own."""

    def initialise(module: nn.Module) -> None:
        values: dict[str, _Kept] = vars(module).get(_VALUES, {})
        with torch.no_grad():
            for key, value in values.items():
                module.get_parameter(key).copy_(torch.as_tensor(value))
        if then is not None:
            then(module)

    return initialise
