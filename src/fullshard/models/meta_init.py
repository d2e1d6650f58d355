"""Modules that are constructed without their parameters, but with their buffers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullshard.errors import SpecError
from fullshard.quantities import format_bytes

_VALUES = "_constructed_values"
# A table of values that are not all the same is kept with the module up to this size.
_MOST_KEPT = 1 << 20
# Kimi K2 has 70,000 parameters in 61 blocks of 384 experts.
_MOST_PARAMETERS = 300_000
_MOST_TABLE_BYTES = 4 << 30
_TABLES = (
    torch.ones,
    torch.zeros,
    torch.full,
    torch.arange,
    torch.linspace,
    torch.eye,
    torch.rand,
    torch.randn,
)

_Kept = float | NDArray[np.float64]


def without_parameters(
    construct: Callable[[], nn.Module], *, most_parameters: int = _MOST_PARAMETERS
) -> nn.Module:
    """What `construct()` returns, with every parameter on the meta device and every buffer as computed.

    Constructors compute buffers (tables of rotary positions, masks, position numbers) that nothing could
    compute again later, and that no checkpoint holds; on the meta device they would be lost
    (transformers#45902). So only `torch.empty`, which parameters are made of, gives tensors without storage.
    A parameter that the constructor makes of values (ones, a temperature) gets these again when the model is
    initialised, unless its module has `reset_parameters`, and before `_init_weights` has its say.

    The same values on every rank: random numbers begin anew here. Whatever `construct` raises comes through.
    Raises SpecError for a model with more than `most_parameters`, or with tables that are too large to be
    meant. A wrong number in a config would else take all memory, or hours, before anything could be said.
    """
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta(most_parameters):
        torch.manual_seed(0)
        model = construct()
    if isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # somebody's own function
        _let_go(model)
        setattr(model, "_init_weights", _with_constructed_values(getattr(model, "_init_weights", None)))  # noqa: B010
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Tensors that are made without values, and without a word on where, are on the meta device.

    Their number is limited, and so is the size of those that are made of one value.
    """

    def __init__(self, most_parameters: int) -> None:
        super().__init__()
        self.most, self.made = most_parameters, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func in (torch.empty, torch.empty_strided) and given.get("device") is None:
            given["device"] = "meta"
            self.made += 1
            if self.made > self.most:
                raise SpecError("the model has too many parameters.", got=f"more than {self.most:,} tensors")
        elif func in _TABLES and given.get("device") != "meta":
            self._check_table(func, args, given=given)
        return func(*args, **given)

    def _check_table(self, func: Any, args: Any, *, given: Mapping[str, Any]) -> None:
        """Raises SpecError for a table that is too large. It is made without storage first."""
        planned = func(*args, **{**given, "device": "meta"})
        if planned.nbytes > _MOST_TABLE_BYTES:
            raise SpecError(
                "the model has a table that is too large.",
                got=f"{list(planned.shape)}: {format_bytes(planned.nbytes)}",
                why=f"a model is constructed with its tables: {_MOST_TABLE_BYTES >> 30} GiB at most",
            )


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
