"""Constructs modules with parameters on the meta device and real buffers.

[Note: what a constructor computes]
A model that is built on the meta device loses the values that its constructor gives to parameters. So a tape
records the operations on meta tensors, and those that a parameter depends on are run again when it has
memory. A parameter then gets what its constructor computes, on every rank. Random operations are seeded by
their place on the tape, so parameters that the constructor copies from each other have equal values.

Some functions of torch.nn.init (`trunc_normal_`, `orthogonal_`) return at once where they are given a meta
tensor. They ask for `is_meta` first, and the call is recorded in place of its operations.
"""

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullshard.errors import SpecError
from fullshard.quantities import format_bytes
from fullshard.torch_private.fake_tensors import TorchDispatchMode
from fullshard.torch_private.tensors import registered_parameters, tree_leaves, tree_map_only

_PLACES = "_constructor_places"
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor on the tape: the number of its memory, and its layout in that memory."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _RecordedOperation:
    """An operation. Its meta tensors are replaced by their places.

    results: for each result, its place if it has new memory, otherwise None
    """

    function: Any
    arguments: tuple[Any, dict[str, Any]]
    reads: frozenset[int]
    results: tuple[RecordedTensor | None, ...]


class ConstructorTape(TorchDispatchMode):
    """Dispatch mode that records the operations on meta tensors. See [Note: what a constructor computes]."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_RecordedOperation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # memory -> numbers of operations
        self._memories: dict[int, int] = {}  # by the id of a storage, which `_storages` keeps alive
        self._storages: list[torch.UntypedStorage] = []

    def __deepcopy__(self, _memo: Any) -> "ConstructorTape":
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        arguments = tree_map_only(
            Tensor, lambda one: self._record_tensor(one) if one.is_meta else one, (args, given)
        )
        result = func(*args, **given)
        places = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, RecordedTensor)]
        results = tuple(self._record_tensor_if_new(leaf) for leaf in tree_leaves(result))
        written = {one.memory for one in results if one is not None}
        if str(func).split(".")[1].endswith("_") and isinstance(arguments[0][0], RecordedTensor):
            written.add(arguments[0][0].memory)
        for memory in written:
            self._writers[memory].append(len(self._operations))
        if written:
            reads = frozenset(place.memory for place in places)
            self._operations.append(_RecordedOperation(func, arguments, reads, results))
        return result

    def record_initialiser_call(self, caller: FrameType | None) -> None:
        """Records a call of a function of torch.nn.init, which asks whether its tensor is on meta."""
        if caller is None or caller.f_globals.get("__name__") != "torch.nn.init":
            return
        code = caller.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        first, *others = (caller.f_locals[name] for name in names if name != "generator")
        function = caller.f_globals.get(code.co_name)
        if callable(function) and isinstance(first, Tensor):
            place = self._record_tensor(first)
            self._writers[place.memory].append(len(self._operations))
            reads = frozenset([place.memory])
            self._operations.append(_RecordedOperation(function, ((place, *others), {}), reads, (None,)))

    def _record_tensor(self, value: Tensor) -> RecordedTensor:
        storage = value.untyped_storage()
        number = self._memories.setdefault(id(storage), len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return RecordedTensor(
            number, tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype
        )

    def _record_tensor_if_new(self, value: Any) -> RecordedTensor | None:
        if isinstance(value, Tensor) and value.is_meta and id(value.untyped_storage()) not in self._memories:
            return self._record_tensor(value)
        return None

    def record_written_parameters(self, model: nn.Module) -> None:
        """Notes, in each module, the places of the meta parameters that something wrote to."""
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                memory = self._memories.get(id(parameter.untyped_storage())) if parameter.is_meta else None
                writers = self._writers[memory] if memory is not None else ()
                if any("empty" not in str(self._operations[number].function) for number in writers):
                    vars(module).setdefault(_PLACES, {})[key] = self._record_tensor(parameter)

    def set_parameters_by_replay(self, module: nn.Module, *, seed: int) -> None:
        """Gives the parameters of `module` itself the values that the constructor computes."""
        for key, place in vars(module).get(_PLACES, {}).items():
            parameter = module.get_parameter(key)
            parameter.copy_(self._replay_tensor(place, device=parameter.device, seed=seed))

    def _replay_tensor(self, place: RecordedTensor, *, device: torch.device, seed: int) -> Tensor:
        memories: dict[int, Tensor] = {}

        def tensor_at(one: RecordedTensor) -> Tensor:
            if one.memory not in memories:
                numel = self._storages[one.memory].nbytes() // one.dtype.itemsize
                empty = torch.empty(numel, dtype=one.dtype, device=device)
                memories[one.memory] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
            return memories[one.memory].as_strided(one.size, one.stride, one.offset)

        for number in self._numbers_of_needed_operations(place.memory):
            operation = self._operations[number]
            arguments = tree_map_only(Tensor, lambda one: one.to(device), operation.arguments)
            args, given = tree_map_only(RecordedTensor, tensor_at, arguments)
            if "device" in given:
                given = given | {"device": device}
            if _SEEDED in getattr(operation.function, "tags", (_SEEDED,)):
                digest = hashlib.sha256(f"{seed}/constructor/{number}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            made = tree_leaves(operation.function(*args, **given))
            for one, value in zip(operation.results, made, strict=True):
                if one is not None:
                    tensor_at(one).copy_(value)
        return tensor_at(place)

    def _numbers_of_needed_operations(self, memory: int) -> list[int]:
        needed, left = set[int](), [(memory, len(self._operations))]
        while left:
            own, end = left.pop()
            for number in self._writers[own]:
                if number < end and number not in needed:
                    needed.add(number)
                    left += [(read, number) for read in self._operations[number].reads]
        return sorted(needed)


_VALUES = "_constructed_values"
# Largest number of elements of a non-constant parameter whose values are kept.
_MOST_KEPT = 1 << 20
# Kimi K2 has 70,000 parameters in 61 blocks of 384 experts.
_MOST_PARAMETERS = 300_000
_MOST_TABLE_BYTES, _MOST_TABLES_BYTES = 1 << 30, 4 << 30  # of one table, and of all
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
    tensors. Values of other parameters (ones, a temperature; at most 2^20 that differ) are set again when the
    model is initialised, unless the module has `reset_parameters`. With a `tape`, so is everything that the
    constructor computes for parameters from `torch.empty`; the model keeps it as `_constructor_tape`.

    The seed is fixed, so that values are the same on every rank. Raises SpecError for more than
    `most_parameters` or very large tables, before a wrong number in a config uses up all memory.
    """
    with torch.random.fork_rng(devices=[]), tape or nullcontext(), _MakeEmptyOnMeta(most_parameters, tape):
        torch.manual_seed(0)
        model = construct()
    if isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        if tape is not None:
            tape.record_written_parameters(model)
            setattr(model, "_constructor_tape", tape)  # noqa: B010
        _replace_parameters_by_meta(model)
        initialise = _kept_values_initialiser(getattr(model, "_init_weights", None))
        setattr(model, "_init_weights", initialise)  # noqa: B010
    return model


class _MakeEmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty` return meta tensors. Limits their number, and the sizes of other new tensors."""

    def __init__(self, most_parameters: int, tape: ConstructorTape | None) -> None:
        super().__init__()
        self.most, self.made, self.tape = most_parameters, 0, tape
        self.table_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func in (torch.empty, torch.empty_strided) and given.get("device") is None:
            given["device"] = "meta"
            self.made += 1
            if self.made > self.most:
                raise SpecError("the model has too many parameters.", got=f"more than {self.most:,} tensors")
        elif func == _IS_META and self.tape is not None:
            self.tape.record_initialiser_call(inspect.currentframe().f_back)  # pyright: ignore[reportOptionalMemberAccess]
        elif func in _TABLES and given.get("device") != "meta":
            planned = func(*args, **{**given, "device": "meta"})
            self.table_bytes += planned.nbytes
            if planned.nbytes > _MOST_TABLE_BYTES or self.table_bytes > _MOST_TABLES_BYTES:
                raise SpecError(
                    "the model has a table that is too large.",
                    got=f"{list(planned.shape)}: {format_bytes(planned.nbytes)}",
                    why=f"a model is constructed with its tables: {_MOST_TABLE_BYTES >> 30} GiB at most, and "
                    f"{_MOST_TABLES_BYTES >> 30} GiB of all",
                )
        return func(*args, **given)


def _replace_parameters_by_meta(model: nn.Module) -> None:
    """Replaces all real parameters by meta ones.

    The values of modules without `reset_parameters` are kept beside them, unless they are too many.
    """
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
