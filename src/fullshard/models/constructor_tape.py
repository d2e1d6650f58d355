"""Records what a constructor computes on meta tensors, and computes it again with values.

A model that is built on the meta device loses the values that its constructor gives to parameters. So the
operations on meta tensors are recorded, and those that a parameter depends on are run again when it has
memory. A parameter then gets what its constructor computes, on every rank. Random operations are seeded by
their place on the tape, so parameters that the constructor copies from each other have equal values.

Some functions of torch.nn.init (`trunc_normal_`, `orthogonal_`) return at once where they are given a meta
tensor. They ask for `is_meta` first, and the call is recorded in place of its operations.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.torch_private.fake_tensors import TorchDispatchMode
from fullshard.torch_private.tensors import tree_leaves, tree_map_only

_PLACES = "_constructor_places"
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Place:
    """A tensor on the tape: the number of its memory, and its layout in that memory."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operation:
    """An operation. Its meta tensors are replaced by their places.

    results: for each result, its place if it has new memory, otherwise None
    """

    function: Any
    arguments: tuple[Any, dict[str, Any]]
    reads: frozenset[int]
    results: tuple[Place | None, ...]

    @property
    def only_allocates(self) -> bool:
        return "empty" in str(self.function)


class ConstructorTape(TorchDispatchMode):
    """Dispatch mode that records the operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # memory -> numbers of operations
        self._memories: dict[int, int] = {}  # by the id of a storage, which `_storages` keeps alive
        self._storages: list[torch.UntypedStorage] = []

    def __deepcopy__(self, _memo: Any) -> "ConstructorTape":
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        arguments = tree_map_only(Tensor, lambda one: self._place(one) if one.is_meta else one, (args, given))
        result = func(*args, **given)
        places = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Place)]
        results = tuple(self._place_if_new(leaf) for leaf in tree_leaves(result))
        written = {one.memory for one in results if one is not None}
        if str(func).split(".")[1].endswith("_") and isinstance(arguments[0][0], Place):
            written.add(arguments[0][0].memory)
        for memory in written:
            self._writers[memory].append(len(self._operations))
        if written:
            reads = frozenset(place.memory for place in places)
            self._operations.append(_Operation(func, arguments, reads, results))
        return result

    def note_initialiser(self, caller: FrameType | None) -> None:
        """Records a call of a function of torch.nn.init, which asks whether its tensor is on meta."""
        if caller is None or caller.f_globals.get("__name__") != "torch.nn.init":
            return
        code = caller.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        first, *others = (caller.f_locals[name] for name in names if name != "generator")
        function = caller.f_globals.get(code.co_name)
        if callable(function) and isinstance(first, Tensor):
            place = self._place(first)
            self._writers[place.memory].append(len(self._operations))
            reads = frozenset([place.memory])
            self._operations.append(_Operation(function, ((place, *others), {}), reads, (None,)))

    def _place(self, value: Tensor) -> Place:
        storage = value.untyped_storage()
        number = self._memories.setdefault(id(storage), len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return Place(number, tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)

    def _place_if_new(self, value: Any) -> Place | None:
        is_meta = isinstance(value, Tensor) and value.is_meta
        return self._place(value) if is_meta and id(value.untyped_storage()) not in self._memories else None

    def note_parameters(self, model: nn.Module) -> None:
        """Notes, in each module, the places of the meta parameters that something wrote to."""
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                memory = self._memories.get(id(parameter.untyped_storage())) if parameter.is_meta else None
                if memory is not None and any(
                    not self._operations[number].only_allocates for number in self._writers[memory]
                ):
                    vars(module).setdefault(_PLACES, {})[key] = self._place(parameter)

    def set_parameters(self, module: nn.Module, *, seed: int) -> None:
        """Gives the parameters of `module` itself the values that the constructor computes."""
        for key, place in vars(module).get(_PLACES, {}).items():
            parameter = module.get_parameter(key)
            parameter.copy_(self._compute(place, device=parameter.device, seed=seed))

    def _compute(self, place: Place, *, device: torch.device, seed: int) -> Tensor:
        memories: dict[int, Tensor] = {}

        def tensor_at(one: Place) -> Tensor:
            if one.memory not in memories:
                numel = self._storages[one.memory].nbytes() // one.dtype.itemsize
                empty = torch.empty(numel, dtype=one.dtype, device=device)
                memories[one.memory] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
            return memories[one.memory].as_strided(one.size, one.stride, one.offset)

        for number in self._needed_operations(place.memory):
            operation = self._operations[number]
            arguments = tree_map_only(Tensor, lambda one: one.to(device), operation.arguments)
            args, given = tree_map_only(Place, tensor_at, arguments)
            if "device" in given:
                given = given | {"device": device}
            if _SEEDED in getattr(operation.function, "tags", (_SEEDED,)):
                digest = hashlib.sha256(f"{seed}/constructor/{number}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            for one, value in zip(
                operation.results, tree_leaves(operation.function(*args, **given)), strict=True
            ):
                if one is not None:
                    tensor_at(one).copy_(value)
        return tensor_at(place)

    def _needed_operations(self, memory: int) -> list[int]:
        """Returns the numbers of the operations that the last value of a memory depends on, in order."""
        needed, left = set[int](), [(memory, len(self._operations))]
        while left:
            own, end = left.pop()
            for number in self._writers[own]:
                if number < end and number not in needed:
                    needed.add(number)
                    left += [(read, number) for read in self._operations[number].reads]
        return sorted(needed)
