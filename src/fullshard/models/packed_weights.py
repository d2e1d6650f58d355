"""Frozen weights of linear modules and experts, kept as packed bytes and dequantised to be multiplied.

[Note: packed rows]
Each row of a weight (..., columns) becomes bytes by itself, so that a shard of rows is packed alone, any
rank count holds the same bytes, and FSDP2, DTensor and a checkpoint see an ordinary uint8 tensor:

    codes | columns / 64 block scales, one byte each | factor, fp32

A block is 64 columns. `factor` is the row's largest absolute value / 255, a block's scale is its own largest
absolute value in units of `factor`, rounded up, and so an element is

    level(code) · scale · factor, computed in fp32 and rounded once to the dtype of the matmul

- nf4: 4 bits a code, two codes a byte, the first of them in the high bits. The levels are those of
  NormalFloat4 (QLoRA, arXiv:2305.14314, appendix E). The paper's double quantisation has 8-bit scales too, in
  groups of 256 blocks with an fp32 factor each, from which it subtracts their mean. Here a group is a row.
- int8: a byte a code; the levels are -127/127 to 127/127.

[Note: dequantised twice]
The autograd function saves the packed bytes, and dequantises again in backward: between forward and backward
there is no matrix. The operation also reads an empty view of the other factor, by which the compiler neither
merges the two nor computes the second one in forward.

The forwards of experts differ, so matrices take the places of their packed parameters while one computes.
Hooks keep autograd from saving them, and dequantise again the experts that it would have saved. In a block
that is recomputed they are not needed: its own hooks save nothing, and in backward its matrices live briefly.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import JsonValue
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fullshard.distributed.tensors import (
    is_experts,
    is_router,
    multiply_by_own_weight,
    set_linear_function,
    storage_key,
)
from fullshard.errors import CheckpointError, ShardError
from fullshard.models.adapted_parameters import READER
from fullshard.models.adapters import has_transposed_weight, reads_base_weight
from fullshard.quantities import format_count, join_names
from fullshard.spec.weight_map import Shape
from fullshard.torch_private.tensors import has_saved_tensors_hooks, registered_parameters

Format = Literal["nf4", "int8"]
FORMATS = ("nf4", "int8")
BLOCK_COLUMNS = 64
UNPACK = "unpack_rows"
_FACTOR_BYTES = 4
_MOST = 255  # of a block's scale
_LEAST = 1e-30  # of a row's largest value: below it, a factor has too few bits
_ATTRIBUTE = "_fullshard_packed"
# The 16 levels of NF4 (arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_CHUNK_ELEMENTS = 1 << 22  # that are unpacked at once, so that temporaries stay small


@dataclass(frozen=True)
class PackedWeight:
    """A weight whose rows are packed.

    name: name of the parameter when it was packed
    form: format of a row
    shape: (rows, columns) of the weight itself, or (experts, rows, columns)
    """

    name: str
    form: Format
    shape: Shape


# Rows #
def packed_row_bytes(columns: int, form: Format) -> int:
    """Returns the bytes of a packed row. See [Note: packed rows]. `columns`: a multiple of 64."""
    return (columns // 2 if form == "nf4" else columns) + columns // BLOCK_COLUMNS + _FACTOR_BYTES


def _columns_of_row_bytes(row_bytes: int, form: str) -> int:
    each = packed_row_bytes(BLOCK_COLUMNS, "nf4" if form == "nf4" else "int8") - _FACTOR_BYTES
    return (row_bytes - _FACTOR_BYTES) // each * BLOCK_COLUMNS


@torch.no_grad()
def pack_rows(weight: Tensor, packed: PackedWeight) -> Tensor:
    """Returns the packed rows, uint8 (..., row bytes), of floating-point `weight` (..., columns).

    Rows of zeros are exact. Raises ShardError for an infinity or NaN.
    """
    if weight.ndim > 2:  # one expert at a time, so that temporaries stay small
        return torch.stack([pack_rows(one, packed) for one in weight])
    rows, columns = weight.shape
    blocks = weight.float().view(rows, columns // BLOCK_COLUMNS, BLOCK_COLUMNS)
    largest = blocks.abs().amax(-1)
    factor = largest.amax(-1, keepdim=True).clamp(min=_LEAST) / _MOST
    if not bool(factor.isfinite().all()):
        raise ShardError(
            f"{packed.name} cannot be packed.",
            got=f"an infinity or NaN in it, and adapter.base_dtype = {packed.form!r}",
            why="a row has one factor, and such a value would make all of the row unusable",
            fix="weights without such values",
        )
    scales = (largest / factor).ceil().clamp(1, _MOST)
    unit = (blocks / (scales * factor).unsqueeze(-1)).view(rows, columns)
    if packed.form == "nf4":
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        each = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        codes = each[:, 0::2] << 4 | each[:, 1::2]
    else:
        codes = (unit * 127).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat([codes, scales.to(torch.uint8), factor.view(torch.uint8)], dim=1)


@torch.library.custom_op(f"fullshard::{UNPACK}", mutates_args=())
def unpack_rows(packed: Tensor, like: Tensor, *, form: str, first: int, columns: int) -> Tensor:
    """Returns `columns` columns from `first` on, multiples of 64, of the weight with the rows `packed`.

    like: tensor whose dtype the result has. See [Note: dequantised twice].
    """
    out = torch.empty((packed.shape[0], columns), dtype=like.dtype, device=packed.device)
    most = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, packed.shape[0], most):
        rows = packed[begin : begin + most]
        out[begin : begin + most] = _unpack_chunk(rows, form, first=first, columns=columns)
    return out


@unpack_rows.register_fake
def _(packed: Tensor, like: Tensor, *, form: str, first: int, columns: int) -> Tensor:
    return packed.new_empty((packed.shape[0], columns), dtype=like.dtype)


def _unpack_chunk(rows: Tensor, form: str, *, first: int, columns: int) -> Tensor:
    """Returns the fp32 values of `columns` columns of packed rows."""
    whole = _columns_of_row_bytes(rows.shape[1], form)
    per_byte = 2 if form == "nf4" else 1
    codes = rows[:, first // per_byte : (first + columns) // per_byte]
    start = whole // per_byte + first // BLOCK_COLUMNS
    scales = rows[:, start : start + columns // BLOCK_COLUMNS].float()
    scales *= rows[:, -_FACTOR_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if form == "nf4":
        values = _level_pairs(rows.device).index_select(0, codes.reshape(-1).int())
    else:
        values = codes.contiguous().view(torch.int8).float()
        scales /= 127
    values = values.view(rows.shape[0], columns // BLOCK_COLUMNS, BLOCK_COLUMNS).mul_(scales.unsqueeze(-1))
    return values.view(rows.shape[0], columns)


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """Returns the two levels of each of the 256 bytes of codes, fp32 (256, 2)."""
    levels, code = torch.tensor(NF4_LEVELS), torch.arange(256)
    return torch.stack([levels[code >> 4], levels[code & 15]], dim=-1).to(device)


class UnpackingCost(NamedTuple):
    """Cost of unpacking a matrix: bytes of temporaries, bytes read and written, and number of kernels."""

    temporary_bytes: int
    moved_bytes: int
    launches: int


def unpacking_cost(elements: int, form: str) -> UnpackingCost:
    """Returns the cost of unpacking `elements`: of an index, fp32 values, their scaling, and a cast copy."""
    held, moved, kernels = (6, 24, 8) if form == "nf4" else (5, 21, 7)
    chunks = -(-elements // _CHUNK_ELEMENTS)
    return UnpackingCost(held * min(elements, _CHUNK_ELEMENTS), moved * elements, kernels * chunks)


def unpack_weight(packed: Tensor, weight: PackedWeight, *, dtype: torch.dtype) -> Tensor:
    """Returns packed rows, any number of those of `weight`, as the matrix that is multiplied in `dtype`."""
    like = torch.empty(0, dtype=dtype, device=packed.device)
    columns = weight.shape[-1]
    rows = unpack_rows(packed.flatten(0, -2), like, form=weight.form, first=0, columns=columns)
    return rows.view(*packed.shape[:-1], columns)


# Matmul #
class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, form: Format, first: int | None) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.is_transposed = first is None
        columns = _columns_of_row_bytes(packed.shape[1], form) if first is None else x.shape[-1]
        ctx.form, ctx.first, ctx.columns = form, first or 0, columns
        weight = unpack_rows(packed, x.narrow(0, 0, 0), form=form, first=ctx.first, columns=columns)
        return F.linear(x, weight.t() if ctx.is_transposed else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (packed,) = gradients, ctx.saved_tensors
        empty = gradient.narrow(0, 0, 0)
        weight = unpack_rows(packed, empty, form=ctx.form, first=ctx.first, columns=ctx.columns)
        return gradient @ (weight.t() if ctx.is_transposed else weight), None, None, None


def _multiply_packed(
    x: Tensor, weight: Tensor, *, bias: Tensor | None, packed: PackedWeight, first: int | None = 0
) -> Tensor:
    """Returns x @ W.T + bias for the packed rows `weight` of W; x has the columns of W from `first` on.

    Returns x @ W + bias if `first` is None, as transposed weights (of `Conv1D`) are multiplied.

    Raises ShardError for an `x` of integers.
    """
    if not x.is_floating_point():
        raise _cast_input_error(packed, x.dtype)
    y = cast(Tensor, _PackedLinear.apply(x, weight, packed.form, first))
    return y if bias is None else y + bias.to(y.dtype)


def _cast_input_error(packed: PackedWeight, dtype: torch.dtype) -> ShardError:
    return ShardError(
        f"the input of {packed.name} was cast to {str(dtype).removeprefix('torch.')}.",
        why="the model casts it to the dtype of the weight, which is packed as bytes",
        fix='adapter.base_dtype = "bf16"',
    )


def multiply_own_columns(linear: nn.Linear, *, part: int, parts: int) -> None:
    """Makes a packed `linear` multiply inputs with one of `parts` equal parts of its columns.

    Each rank keeps whole rows. Raises ShardError if blocks of 64 columns would be cut.
    """
    packed = packed_weight_of(linear)
    assert packed is not None, "its weight is packed"
    columns, rest = divmod(packed.shape[-1], parts)
    if rest or columns % BLOCK_COLUMNS:
        raise ShardError(
            f"the columns of {packed.name} cannot be divided over {parts} ranks.",
            got=f"{packed.shape[-1]} columns, and adapter.base_dtype = {packed.form!r}",
            why=f"blocks of {BLOCK_COLUMNS} columns share a scale, and stay on one rank",
            fix='a smaller sharding.tensor_parallel, or adapter.base_dtype = "bf16"',
        )
    set_linear_function(linear, partial(_multiply_packed, packed=packed, first=part * columns))


@torch.compiler.disable  # the compiler does not see a tensor in the place of a parameter
def _compute_with_matrices(  # signature: the module's own, after the bound arguments
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls `forward` with matrices, in the dtype of its input, in the places of packed parameters."""
    parameters: dict[str, Any] = registered_parameters(module)
    before = {key: parameters[key] for key in _packed_by_key(module)}
    dtypes = [one.dtype for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    dtype = next((one for one in dtypes if one.is_floating_point), None)
    if dtype is None:
        raise _cast_input_error(next(iter(_packed_by_key(module).values())), dtypes[0])
    try:
        again = dict[int, Callable[..., Tensor]]()
        for key, packed in _packed_by_key(module).items():
            if not before[key].is_floating_point():  # else the sum with an adapter
                parameters[key] = made = unpack_weight(before[key], packed, dtype=dtype)
                again[storage_key(made)] = partial(_unpack_view, before[key], packed, dtype=dtype)
        keeps = not again or has_saved_tensors_hooks()
        with nullcontext() if keeps else _replace_saved_tensors(again):
            return forward(*args, **kwargs)
    finally:
        parameters.update(before)


def _replace_saved_tensors(again: Mapping[int, Callable[..., Tensor]]) -> AbstractContextManager[None]:
    """Context in which autograd saves functions of `again`, by storage, in place of views of its matrices."""

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        make = again.get(storage_key(tensor))
        if make is None:
            return tensor.detach()  # the output of an operation would form a reference cycle
        return partial(make, view=(tensor.size(), tensor.stride(), tensor.storage_offset()))

    return saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved())


def _unpack_view(
    packed: Tensor, weight: PackedWeight, *, dtype: torch.dtype, view: tuple[Shape, Shape, int]
) -> Tensor:
    """Returns a view (size, stride, offset) of the matrices of packed experts. Unpacks only those in it."""
    (size, stride, offset), each = view, math.prod(weight.shape[1:])
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    own = packed.detach()[offset // each : last // each + 1]
    return unpack_weight(own, weight, dtype=dtype).as_strided(size, stride, offset % each)


def _unpack_parameter(module: nn.Module, key: str, *, dtype: torch.dtype) -> Tensor:
    return unpack_weight(getattr(module, key), _packed_by_key(module)[key], dtype=dtype)


# Models #
def _packed_by_key(module: nn.Module) -> dict[str, PackedWeight]:
    return vars(module).get(_ATTRIBUTE, {})


def packed_weight_of(module: nn.Module) -> PackedWeight | None:
    """Returns the description of the module's `weight` if it is packed, else None."""
    return _packed_by_key(module).get("weight")


def find_packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Returns the packed weights of `model` by parameter name."""
    return {
        f"{name}.{key}": packed
        for name, module in model.named_modules()
        for key, packed in _packed_by_key(module).items()
    }


def shapes_of_matrices(tensors: Mapping[str, Tensor], packed: Mapping[str, PackedWeight]) -> dict[str, Shape]:
    """Returns the shapes of `tensors` by name; of packed weights, those of the matrices."""
    return {name: packed[name].shape if name in packed else tuple(one.shape) for name, one in tensors.items()}


def packing_record(model: nn.Module) -> dict[str, JsonValue] | None:
    """Returns what a checkpoint records of packed weights: the format, and the names; None without any."""
    packed = find_packed_weights(model)
    form = next((one.form for one in packed.values()), None)
    return {"format": form, "block_columns": BLOCK_COLUMNS, "names": [*packed]} if form else None


def packed_weights_in_record(record: JsonValue, shapes: Mapping[str, Shape]) -> dict[str, PackedWeight]:
    """Returns the packed weights among tensors of these shapes, by name. Raises CheckpointError."""
    if record is None:
        return {}
    form, block, names = _values_of_record(record)
    if form not in FORMATS or block != BLOCK_COLUMNS or not isinstance(names, list):
        raise CheckpointError(
            "the checkpoint's weights are packed in a format that is not known.",
            got=f"{form!r}, in blocks of {block!r} columns",
            fix="the fullshard that wrote it",
        )
    return {
        name: PackedWeight(name, form, (*shape[:-1], _columns_of_row_bytes(shape[-1], form)))
        for name, shape in shapes.items()
        if name in names and len(shape) > 1
    }


def check_same_packing(model: nn.Module, record: JsonValue) -> None:
    """Raises CheckpointError if the checkpoint with this `record` is of a base in another format."""
    current = packing_record(model)
    if record != current:
        before, now = (_values_of_record(one)[0] or "not packed" for one in (record, current))
        raise CheckpointError(
            "the run cannot continue: its frozen base is another.",
            got=f"adapter.base_dtype: {before} in the checkpoint, {now} here"
            if before != now
            else f"{before} of other matrices in the checkpoint than here",
            why="the adapters were trained with the rounding of that base",
            fix="adapter.base_dtype as it was, or another run.dir to start over",
        )


def _values_of_record(record: JsonValue) -> tuple[Any, Any, Any]:
    values = record if isinstance(record, dict) else {}
    return values.get("format"), values.get("block_columns"), values.get("names")


def count_elements(model: nn.Module) -> int:
    """Returns the number of elements of all parameters, of packed weights those of the matrices."""
    owners = {one: module for module in model.modules() for one in module.parameters(recurse=False)}
    return sum(element_count(module, one) for one, module in owners.items())


def element_count(module: nn.Module, parameter: nn.Parameter) -> int:
    """Returns the elements of a parameter of `module`; of its packed weight, those of the matrix."""
    packed = (one for key, one in _packed_by_key(module).items() if getattr(module, key) is parameter)
    return math.prod(next((one.shape for one in packed), parameter.shape))


def pack_frozen_weights(model: nn.Module, form: Format) -> nn.Module:
    """Replaces frozen weights of linear modules and experts in repeated blocks by packed ones, on meta.

    Changes `model` in place, and returns it. `describe_packing` lists which matrices are packed. Raises
    ShardError if none is.
    """
    chosen = [(n, m) for n, (m, why) in _frozen_matrices(model).items() if not why]
    for name, module in chosen:
        key, own = name.rpartition(".")[2], vars(module).setdefault(_ATTRIBUTE, {})
        weight: Tensor = getattr(module, key)
        *rows, columns = weight.shape
        data = weight.new_empty((*rows, packed_row_bytes(columns, form)), dtype=torch.uint8)
        setattr(module, key, nn.Parameter(data, requires_grad=False))
        own[key] = packed = PackedWeight(name, form, tuple(weight.shape))
        if weight.ndim == 2:
            first = None if has_transposed_weight(module) else 0
            set_linear_function(module, partial(_multiply_packed, packed=packed, first=first))
            module.forward = partial(multiply_by_own_weight, module)
        elif len(own) == 1:  # once for all parameters of the module
            module.forward = partial(_compute_with_matrices, module, module.forward)
            setattr(module, READER, partial(_unpack_parameter, module))
    if not chosen:
        raise ShardError(
            f"{type(model).__name__} has no matrix to pack.",
            got=f"adapter.base_dtype = {form!r}; {describe_packing(model)}",
            why="only frozen linear modules and experts of blocks are packed, "
            f"with a multiple of {BLOCK_COLUMNS} columns",
            fix='adapter.base_dtype = "bf16"',
        )
    return model


def describe_packing(model: nn.Module) -> str:
    """Returns which frozen matrices of `model` are packed, and why others are not, with names and counts."""
    packed = find_packed_weights(model)
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, (_, why) in _frozen_matrices(model).items():
        groups[why].append(name)
    groups.pop("", None)
    elements = sum(math.prod(one.shape) for one in packed.values())
    forms = ", ".join(sorted({one.form for one in packed.values()}))
    text = f"{len(packed)} frozen matrices in {forms} ({format_count(elements)} elements)" if packed else ""
    others = "; ".join(f"{len(names)} {why}: {join_names(names)}" for why, names in groups.items())
    return "; ".join(part for part in (text, f"not packed: {others}" if others else "") if part)


def _frozen_matrices(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns {name: (module, why it is not to be packed)} of frozen matrices; "" for those to pack."""
    holders: defaultdict[int, int] = defaultdict(int)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)] += 1
    modules, found = dict(model.named_modules()), dict[str, tuple[nn.Module, str]]()
    for path, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            is_stack = is_experts(module)  # whose vectors have two dims
            if parameter.requires_grad or parameter.ndim < 2 + is_stack or not parameter.is_floating_point():
                continue
            is_linear = type(module) is nn.Linear or has_transposed_weight(module)
            outer = path.removesuffix(".base_layer").rpartition(".")[0]
            adapted = reads_base_weight(modules.get(path.removesuffix(".base_layer")))
            conditions: Mapping[str, bool] = {
                "outside of the blocks": not any(part.isdigit() for part in path.split(".")),
                "tied": holders[id(parameter)] > 1,
                "of other modules": not is_stack and not (is_linear and key == "weight"),
                "that their adapters read": adapted and not is_stack,
                "of routers": not is_stack and is_router(module, modules[outer]),
                f"of columns that {BLOCK_COLUMNS} does not divide": parameter.shape[-1] % BLOCK_COLUMNS != 0,
            }
            found[f"{path}.{key}"] = (module, next((why for why, holds in conditions.items() if holds), ""))
    return found
