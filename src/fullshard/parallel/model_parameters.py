"""Parameters of a model before it is sharded: which are refused, what the shards take over, their dtypes."""

import itertools
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fullshard.distributed.agreement import all_gather_object, rank
from fullshard.distributed.tensors import storage_key
from fullshard.errors import ShardError
from fullshard.quantities import count_text, join_names
from fullshard.spec.plan import Dtype, Precision
from fullshard.torch_private.tensors import (
    gradient_hooks,
    non_persistent_buffers,
    post_accumulate_hooks,
    registered_buffers,
    registered_parameters,
)

_MOST_OBJECTS = 10_000  # of an attribute, which are searched for parameters
_REGISTRATIONS = {"_parameters", "_modules"}

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
    _refuse_max_norm_and_sparse_embeddings(model)
    double = [name for name, one in parameters.items() if one.dtype == torch.float64 and one.requires_grad]
    if double and rank() == 0:
        logger.warning(
            "%d parameters in float64 are trained in the run's dtype: %s", len(double), join_names(double)
        )


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
        lambda one: one.is_complex() and one.requires_grad,
        "FSDP2 reduces gradients of real numbers",
        "keep torch.view_as_real(value) as the parameter, and view_as_complex it in forward; or freeze it",
    ),
    "an empty parameter": (
        lambda one: not one.is_meta and one.numel() == 0,
        "FSDP2 cannot gather a tensor without elements",
        "leave it out, or register it as a buffer",
    ),
    "a parameter in fp8": (
        lambda one: one.is_floating_point() and one.itemsize == 1,
        "collectives of parameters have 16 bits or more",
        "a parameter in bf16; precision.mode = fp8 multiplies it in fp8",
    ),
    "a parameter with a gradient hook": (
        lambda one: bool(gradient_hooks(one)),
        "register_hook is called with whole gradients, which no rank has",
        "after shard, register_post_accumulate_grad_hook on the sharded parameter",
    ),
}


def _refuse_max_norm_and_sparse_embeddings(model: nn.Module) -> None:
    """Raises ShardError for embeddings with max_norm, or sparse or frequency-scaled gradients."""
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
        by_rank = "each rank counts the tokens of its own microbatch, not those of the batch"
        for option, kind, why in (
            ("sparse", "with sparse gradients", "FSDP2 reduces dense gradients"),
            ("scale_grad_by_freq", "whose gradients are scaled by frequency", by_rank),
        ):
            if getattr(module, option) and module.weight.requires_grad:
                raise ShardError(
                    f"an embedding {kind} cannot be sharded.",
                    got=f"{name or type(module).__name__}, {option} = True",
                    why=why,
                    fix=f"{option} = False",
                )


def _check_attributes_hold_no_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ShardError for an attribute with a parameter (in a list, dict, closure, …) or with its memory.

    `shard` replaces registered parameters only, so such a reference would have the first values for ever.
    """
    names = {id(one): name for name, one in parameters.items()}
    places = defaultdict[int, list[tuple[int, int, str]]](list)
    for name, one in parameters.items():
        for storage, begin, end in _find_storage_and_byte_range(one):
            places[storage].append((begin, end, name))

    def find_parameters_sharing_memory(one: Any) -> Iterable[str]:
        yield from [names[id(one)]] if id(one) in names else []
        for storage, begin, end in _find_storage_and_byte_range(one):
            yield from (name for first, last, name in places[storage] if first < end and begin < last)

    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _REGISTRATIONS or (key == "_flat_weights" and isinstance(module, nn.RNNBase)):
                continue  # recurrent layers renew this list when a parameter is replaced
            if f"{key}_orig" in registered_parameters(module):
                continue  # torch's spectral norm computes it from that parameter before each forward
            found = next(
                (
                    name
                    for one in _iterate_contained_objects(value)
                    for name in find_parameters_sharing_memory(one)
                ),
                None,
            )
            if found is not None:
                raise ShardError(
                    f"an attribute of {path or type(model).__name__} holds a parameter of the model.",
                    got=f"{key}: a {type(value).__name__} with {found}",
                    why="sharding replaces registered parameters; the attribute would keep the first values, "
                    "as would a view or a buffer in the memory of a parameter",
                    fix="an nn.ParameterList or ParameterDict, a property, a clone, or a forward that reads "
                    "the registered parameter",
                )


def _iterate_contained_objects(value: Any) -> Iterable[Any]:
    """Yields `value` and up to _MOST_OBJECTS in its containers, closures, attributes, not inside modules."""
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
            left += [cell.cell_contents for cell in one.__closure__ or () if _is_closure_cell_filled(cell)]
        elif not isinstance(one, type | nn.Module | torch.Tensor) and hasattr(one, "__dict__"):
            left += vars(one).values()


def _is_closure_cell_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _check_memory_is_not_shared(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ShardError if contiguous parameters share elements, since each would get a copy of its own."""
    kept = {name: one for name, one in parameters.items() if one.is_contiguous()}
    places = sorted(
        (*place, name) for name, one in kept.items() for place in _find_storage_and_byte_range(one)
    )
    for (storage, _, end, name), (next_storage, begin, _, other) in itertools.pairwise(places):
        if storage == next_storage and begin < end:
            raise ShardError(
                "two parameters share memory, and are not one parameter.",
                got=f"{name}, {other}",
                why="each would be sharded and updated apart",
                fix="register one nn.Parameter in both modules, or compute one from the other in forward",
            )


def _find_storage_and_byte_range(one: Any) -> list[tuple[int, int, int]]:
    """Returns the storage of `one`, and where its bytes begin and end there; nothing if it has no storage."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided or type(one.data) is not Tensor:
        return []
    begin = int(one.storage_offset()) * one.itemsize
    steps = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
    return [(storage_key(one), begin, begin + (steps + 1) * one.itemsize)] if one.numel() else []


@dataclass(frozen=True)
class ParameterAttributesAndHooks:
    """Attributes and post-accumulate hooks of a model's parameters, by name."""

    attributes: Mapping[str, Mapping[str, Any]]
    hooks: Mapping[str, list[Callable[[Any], None]]]

    @classmethod
    def of_model(cls, model: nn.Module) -> "ParameterAttributesAndHooks":
        named = dict(model.named_parameters())
        return cls(
            {name: dict(vars(one)) for name, one in named.items()},
            {name: hooks for name, one in named.items() if (hooks := post_accumulate_hooks(one))},
        )

    def set_on(self, model: nn.Module) -> None:
        """Registers the hooks on the sharded parameters, and sets the attributes that these lack."""
        for name, parameter in model.named_parameters():
            for key, value in self.attributes[name].items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)
            for hook in self.hooks.get(name, []):
                parameter.register_post_accumulate_grad_hook(hook)


# Rank 0's values #
@dataclass
class Rank0Values:
    """Rank 0's parameters and buffers. All ranks have the same names, in the order of broadcasts."""

    # rank 0's tensors by name; on the other ranks, meta tensors of the same shapes and dtypes
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    # the memory in which this rank receives all broadcasts
    receive_buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def broadcast_and_remove(self, name: str, device: torch.device) -> Tensor:
        """Broadcasts and removes a tensor. Returns it on all ranks, valid until the next call. Collective."""
        value = self.tensors[name]
        if value.is_meta:
            # One buffer for all: gloo's thread may keep a tensor for a while after its broadcast has ended.
            if self.receive_buffer.nbytes < value.nbytes:
                largest = max(tensor.nbytes for tensor in self.tensors.values())
                self.receive_buffer = torch.empty(largest, dtype=torch.uint8, device=device)
            whole = self.receive_buffer[: value.nbytes].view(value.dtype).view(value.shape)
        else:
            whole = value.to(device).contiguous()
        if dist.is_initialized() and dist.get_world_size() > 1 and whole.numel():
            dist.broadcast(whole, src=0)
        del self.tensors[name]
        return whole


class MissingWeightsWarning(UserWarning):
    """Warning of a model that holds only some of its weights; the missing ones are initialised."""


def warn_of_missing_weights(model: nn.Module, values: Rank0Values, *, stacklevel: int) -> None:
    """Issues a MissingWeightsWarning on rank 0 if `values` lacks some, but not all, parameters of `model`.

    It also names new adapters, which lack values on purpose. Without it, weights missing from a checkpoint
    would go unnoticed (NeMo Automodel#1148).
    """
    missing = [name for name, _ in model.named_parameters() if name not in values.tensors]
    given = len(list(model.parameters())) - len(missing)
    if dist.get_rank() == 0 and given and missing:
        count = f"{len(missing)} of {given + len(missing)} parameters"
        text = f"{count} hold no values, and are initialised: {join_names(missing)}"
        warnings.warn(text, MissingWeightsWarning, stacklevel=stacklevel + 1)


@dataclass(frozen=True)
class _TensorProperties:
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_real: bool
    is_parameter: bool
    requires_grad: bool

    def __str__(self) -> str:
        """Returns what must be equal on all ranks. Trained parameters get the plan's master dtype anyway."""
        kind = ", trained" if self.requires_grad else f", frozen, {self.dtype}"
        return f"shape {self.shape}{kind if self.is_parameter else ''}"


def collect_rank0_values(model: nn.Module) -> Rank0Values:
    """Returns rank 0's real parameters and buffers. Collective.

    Raises ShardError on all ranks if they hold different models, or one holds weights that rank 0 lacks.
    """
    tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    own = {
        name: _TensorProperties(
            tuple(t.shape), t.dtype, not t.is_meta, isinstance(t, nn.Parameter), t.requires_grad
        )
        for name, t in tensors.items()
    }
    first = _broadcast_and_compare_properties(own) if dist.get_world_size() > 1 else own
    real = {name: given for name, given in first.items() if given.is_real}
    if dist.get_rank() == 0:
        return Rank0Values({name: tensors[name].detach() for name in real})
    return Rank0Values({n: torch.empty(g.shape, dtype=g.dtype, device="meta") for n, g in real.items()})


def _broadcast_and_compare_properties(own: dict[str, _TensorProperties]) -> dict[str, _TensorProperties]:
    """Returns rank 0's tensor properties. Raises ShardError on all ranks if any rank's own differ."""
    sent = [own]
    dist.broadcast_object_list(sent, src=0)
    for number, error in enumerate(all_gather_object(_find_model_difference_error(sent[0], own))):
        if error is not None:
            raise ShardError(f"rank {number} holds {error.what}", got=error.got, why=error.why, fix=error.fix)
    return sent[0]


def _find_model_difference_error(
    first: Mapping[str, _TensorProperties], given: Mapping[str, _TensorProperties]
) -> ShardError | None:
    for name in {**first, **given}:
        here, there = (str(one.get(name) or "nothing") for one in (given, first))
        if here != there:
            return ShardError(
                "another model than rank 0.",
                got=f"{name}: {here} on this rank, {there} on rank 0",
                why="every rank must shard the same parameters",
                fix="build the same model on every rank",
            )
    extra = [n for n, g in given.items() if g.is_parameter and g.is_real and not first[n].is_real]
    if extra:
        return ShardError(
            "weights that rank 0 does not.",
            got=f"{count_text(len(extra), 'parameter')}, {extra[0]} among them, on the meta device of rank 0",
            why="rank 0's values are the ones that every rank gets",
            fix="load the weights on rank 0, or on every rank",
        )
    return None


TORCH_DTYPE: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def warn_of_modules_to_keep_in_fp32(model: nn.Module, precision: Precision) -> None:
    """Logs which modules transformers would compute in fp32, where FSDP2 has one dtype for each unit."""
    asked: set[Any] = set()
    for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        asked |= set(getattr(model, key, None) or ())
    kept = sorted(part for part in map(str, asked) if any(part in key for key, _ in model.named_parameters()))
    if kept and precision.param != "fp32" and rank() == 0:
        logger.warning(
            "transformers keeps %s of %s in fp32, and this run computes them in %s. For fp32: "
            'precision.mode = fp32, or units of their own with precision = "fp32" (sharding.units)',
            ", ".join(kept),
            type(model).__name__,
            precision.param,
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's buffers that a state dict has, by name."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in non_persistent_buffers(module)
    }


def replace_by_id(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    """Replaces parameters and buffers in all modules that hold them. `replaced`: id of the old -> the new."""
    for module in model.modules():
        for own in cast(Any, (registered_parameters(module), registered_buffers(module))):
            own |= {key: replaced[id(one)] for key, one in own.items() if id(one) in replaced}
