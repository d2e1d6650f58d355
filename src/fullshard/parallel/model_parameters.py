"""Parameters of a model before it is sharded: which are refused, and what the shards take over."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fullshard.distributed.agreement import rank
from fullshard.errors import ShardError
from fullshard.quantities import join_names
from fullshard.torch_private.tensors import gradient_hooks, post_accumulate_hooks

_MOST_OBJECTS = 10_000  # of an attribute, which are searched for parameters
_REGISTRATIONS = {"_parameters", "_buffers", "_modules"}

logger = logging.getLogger("fullshard")


def check_parameters(model: nn.Module) -> None:
    """Raises ShardError for parameters that FSDP2 cannot shard, reduce or keep as one.

    Otherwise they would fail in a step, or be silently wrong: gradient hooks are not called, parameters that
    share memory would be trained apart, and a list of parameters would keep their first values. Logs the
    names of trained parameters in float64.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ShardError(f"{type(model).__name__} has no parameters.", why="there is nothing to shard")
    for kind, (is_refused, why, fix) in _REFUSED.items():
        if names := [name for name, parameter in parameters.items() if is_refused(parameter)]:
            raise ShardError(f"{kind} cannot be sharded.", got=join_names(names), why=why, fix=fix)
    _check_memory_is_not_shared(parameters)
    _check_attributes_hold_no_parameters(model, parameters)
    _check_embeddings(model)
    double = [name for name, one in parameters.items() if one.dtype == torch.float64 and one.requires_grad]
    if double and rank() == 0:
        logger.warning(
            "%d parameters in float64 are trained in the run's dtype: %s", len(double), join_names(double)
        )


def _is_trained_complex(parameter: nn.Parameter) -> bool:
    return parameter.is_complex() and parameter.requires_grad


def _is_float8(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.itemsize == 1


# Kind: (whether a parameter is of it, why it is refused, what to do). The first matters for all others.
_REFUSED: dict[str, tuple[Callable[[nn.Parameter], bool], str, str]] = {
    "a parameter without a shape": (
        is_lazy,
        "its module is lazy",
        "run one batch through the model before it is sharded, or give the module its shape",
    ),
    "a sparse parameter": (
        lambda one: one.layout is not torch.strided,
        "FSDP2 cuts dense tensors",
        "a dense parameter",
    ),
    "a trained complex parameter": (
        _is_trained_complex,
        "FSDP2 reduces gradients of real numbers",
        "keep torch.view_as_real(value) as the parameter, and view_as_complex it in forward; or freeze it",
    ),
    "an empty parameter": (
        lambda one: not one.is_meta and one.numel() == 0,
        "FSDP2 cannot gather a tensor without elements",
        "leave it out, or register it as a buffer",
    ),
    "a parameter in fp8": (
        _is_float8,
        "collectives of parameters have 16 bits or more",
        "a parameter in bf16; precision.mode = fp8 multiplies it in fp8",
    ),
    "a parameter with a gradient hook": (
        lambda one: bool(gradient_hooks(one)),
        "register_hook is called with whole gradients, which no rank has",
        "after shard, register_post_accumulate_grad_hook on the sharded parameter",
    ),
}


def _check_embeddings(model: nn.Module) -> None:
    """Raises ShardError for embeddings with max_norm or sparse gradients."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm is not None:
            raise ShardError(
                "an embedding with max_norm cannot be sharded.",
                got=f"{name or type(module).__name__}, max_norm = {module.max_norm}",
                why="its forward changes gathered weights, which are dropped behind it",
                fix="max_norm = None, and between steps, without gradients: "
                "w.mul_((max_norm / w.norm(dim=1, keepdim=True)).clamp(max=1)) of the weight w",
            )
        if module.sparse and module.weight.requires_grad:
            raise ShardError(
                "an embedding with sparse gradients cannot be sharded.",
                got=f"{name or type(module).__name__}, sparse = True",
                why="FSDP2 reduces dense gradients",
                fix="sparse = False",
            )


def _check_attributes_hold_no_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ShardError for a parameter in a list, dict, closure or object that is an attribute of a module.

    `shard` replaces registered parameters only, so such a reference would have the first values for ever.
    """
    names = {id(one): name for name, one in parameters.items()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _REGISTRATIONS or (key == "_flat_weights" and isinstance(module, nn.RNNBase)):
                continue  # recurrent layers renew this list when a parameter is replaced
            found = next((names[id(one)] for one in _iterate_inside(value) if id(one) in names), None)
            if found is not None:
                raise ShardError(
                    f"an attribute of {path or type(model).__name__} holds a parameter of the model.",
                    got=f"{key}: a {type(value).__name__} with {found}",
                    why="sharding replaces registered parameters; the attribute would keep the first values",
                    fix="an attribute that is an nn.ParameterList, nn.ParameterDict or a property, or a "
                    "forward that reads the registered parameter",
                )


def _iterate_inside(value: Any) -> Iterable[Any]:
    """Yields `value` and what its containers, closures and attributes hold, except inside of modules."""
    left, seen = [value], set[int]()
    while left and len(seen) < _MOST_OBJECTS:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, list | tuple | set | frozenset):
            left += one
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        elif not isinstance(one, type | nn.Module | torch.Tensor) and hasattr(one, "__dict__"):
            left += vars(one).values()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _check_memory_is_not_shared(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ShardError if distinct parameters have elements in common, since each gets a copy of its own."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, one in parameters.items():
        if one.is_meta or type(one.data) is not torch.Tensor or not one.is_contiguous():
            continue
        begin = one.data_ptr()
        ranges.setdefault(one.untyped_storage().data_ptr(), []).append((begin, begin + one.nbytes, name))
    for own in ranges.values():
        own.sort()
        for (_, end, name), (begin, _, other) in zip(own, own[1:], strict=False):
            if begin < end:
                raise ShardError(
                    "two parameters share memory, and are not one parameter.",
                    got=f"{name}, {other}",
                    why="each would be sharded and updated apart",
                    fix="register one nn.Parameter in both modules, or compute one from the other in forward",
                )


@dataclass(frozen=True)
class CarriedOver:
    """Attributes and post-accumulate hooks of a model's parameters, by name."""

    attributes: Mapping[str, Mapping[str, Any]]
    hooks: Mapping[str, list[Callable[[Any], None]]]

    @classmethod
    def of_model(cls, model: nn.Module) -> "CarriedOver":
        named = dict(model.named_parameters())
        return cls(
            {name: dict(vars(one)) for name, one in named.items()},
            {name: hooks for name, one in named.items() if (hooks := post_accumulate_hooks(one))},
        )

    def set_on(self, model: nn.Module) -> None:
        """Sets them on the sharded parameters. The hooks are then called with these."""
        for name, parameter in model.named_parameters():
            for key, value in self.attributes[name].items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)
            for hook in self.hooks.get(name, []):
                parameter.register_post_accumulate_grad_hook(hook)
