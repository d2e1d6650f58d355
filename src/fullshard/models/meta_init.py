"""Constructs modules with parameters on the meta device and real buffers."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullshard.errors import SpecError
from fullshard.models.constructor_tape import ConstructorTape
from fullshard.quantities import format_bytes
from fullshard.torch_private.tensors import registered_parameters

_VALUES = "_constructed_values"
# Largest number of elements of a non-constant parameter whose values are kept.
_MOST_KEPT = 1 << 20
# Kimi K2 has 70,000 parameters in 61 blocks of 384 experts.
_MOST_PARAMETERS = 300_000
_MOST_TABLE_BYTES = 4 << 30
_IS_META = torch.Tensor.is_meta.__get__  # pyright: ignore[reportAttributeAccessIssue]
_CONSTANT_TABLES = (torch.ones, torch.zeros, torch.full, torch.eye)
_TABLES = (*_CONSTANT_TABLES, torch.arange, torch.linspace, torch.rand, torch.randn)

_Kept = float | NDArray[np.float64]


def construct_with_meta_parameters(
    construct: Callable[[], nn.Module],
    *,
    most_parameters: int = _MOST_PARAMETERS,
    tape: ConstructorTape | None = None,
) -> nn.Module:
    """Returns the module that `construct()` builds, with parameters on the meta device and real buffers.

    Constructors compute buffers (rotary tables, masks) that are in no checkpoint, and that the meta device
    would lose (transformers#45902). So only `torch.empty`, from which parameters are made, returns meta
    tensors. Values that the constructor writes into parameters (ones, a temperature) are set again when the
    model is initialised, unless the module has `reset_parameters`. With a `tape`, so is everything that the
    constructor computes for parameters from `torch.empty`; the model keeps it as `_constructor_tape`.

    The seed is fixed, so that values are the same on every rank. Raises SpecError for more than
    `most_parameters` or very large tables, before a wrong number in a config uses up all memory.
    """
    with (
        torch.random.fork_rng(devices=[]),
        tape or nullcontext(),
        _MakeEmptyTensorsOnMeta(most_parameters, tape),
    ):
        torch.manual_seed(0)
        model = construct()
    if isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        if tape is not None:
            tape.note_parameters(model)
            setattr(model, "_constructor_tape", tape)  # noqa: B010
        _replace_parameters_by_meta(model)
        initialise = _kept_values_initialiser(getattr(model, "_init_weights", None))
        setattr(model, "_init_weights", initialise)  # noqa: B010
    return model


class _MakeEmptyTensorsOnMeta(TorchFunctionMode):
    """Makes `torch.empty` return meta tensors. Limits their number, and the sizes of other new tensors."""

    def __init__(self, most_parameters: int, tape: ConstructorTape | None) -> None:
        super().__init__()
        self.most, self.made, self.tape = most_parameters, 0, tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func in (torch.empty, torch.empty_strided) and given.get("device") is None:
            given["device"] = "meta"
            self.made += 1
            if self.made > self.most:
                raise SpecError("the model has too many parameters.", got=f"more than {self.most:,} tensors")
        elif func == _IS_META and self.tape is not None:
            self.tape.note_initialiser(inspect.currentframe().f_back)  # pyright: ignore[reportOptionalMemberAccess]
        elif func in _TABLES and given.get("device") != "meta":
            self._check_new_tensor_size(func, args, given=given)
        return func(*args, **given)

    def _check_new_tensor_size(self, func: Any, args: Any, *, given: Mapping[str, Any]) -> None:
        """Raises SpecError if `func` would make a tensor that is too large; runs it on the meta device."""
        planned = func(*args, **{**given, "device": "meta"})
        if planned.nbytes > _MOST_TABLE_BYTES:
            raise SpecError(
                "the model has a table that is too large.",
                got=f"{list(planned.shape)}: {format_bytes(planned.nbytes)}",
                why=f"a model is constructed with its tables: {_MOST_TABLE_BYTES >> 30} GiB at most",
            )


def _replace_parameters_by_meta(model: nn.Module) -> None:
    """Replaces every real parameter by one on the meta device, and keeps its values in the module."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                continue
            if id(parameter) not in replaced:
                data = torch.empty_like(parameter, device="meta")
                replaced[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            registered_parameters(module)[key] = replaced[id(parameter)]
            value = _constructed_values_to_keep(parameter.detach())
            if value is not None and not hasattr(module, "reset_parameters"):
                vars(module).setdefault(_VALUES, {})[key] = value


def _constructed_values_to_keep(value: Tensor) -> _Kept | None:
    """Returns a parameter's values to keep: a number if all are equal, else an array; None if too many."""
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return float(value.flatten()[0].item())
    # Not a tensor: the module may be copied under fake tensors.
    return value.double().numpy() if value.numel() <= _MOST_KEPT else None


def _kept_values_initialiser(then: Callable[[nn.Module], object] | None) -> Callable[[nn.Module], None]:
    """Returns an initialiser of one module, which sets the constructor's values, then calls `then`."""

    def set_constructed_values(module: nn.Module) -> None:
        values: dict[str, _Kept] = vars(module).get(_VALUES, {})
        with torch.no_grad():
            for key, value in values.items():
                module.get_parameter(key).copy_(torch.as_tensor(value))
        if then is not None:
            then(module)

    return set_constructed_values
