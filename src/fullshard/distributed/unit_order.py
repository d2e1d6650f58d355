"""The order in which a rank gathers and reduces units, which must be the same on all ranks.

Ranks that run different modules (layers that are dropped at random, towers that a batch does not need) gather
and reduce different units together. If the units are of one size, nothing fails: each rank then computes with
parts of two units' weights, and their gradients are mixed (fairscale#796).
"""

import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_fullshard_unit_order"
# In a loop that never takes the events, the oldest are dropped.
_MOST_NUMBERS = 1 << 20


@dataclass(frozen=True)
class UnitAndParameterNames:
    """Names of a unit and of its parameters, in the order of FSDP2."""

    unit: str
    parameters: Sequence[str]


@dataclass(frozen=True)
class UnitEvents:
    """Units that a rank has gathered and reduced, in order.

    names: of all units; equal on all ranks
    numbers: twice the number of a unit for a gather, one more for a reduction. A reduction is followed by
        -1 - i for each parameter i that has no gradient.
    """

    names: Sequence[UnitAndParameterNames]
    numbers: "array[int]"

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.numbers)

    def first_differing_event_texts(self, orders: Sequence["array[int]"]) -> list[str]:
        """Compares `orders`, the `numbers` of ranks. Returns a text of each one's first that differs."""
        split = [_split_into_events(numbers) for numbers in orders]
        pairs = enumerate(zip(*split, strict=False))
        at = next((i for i, events in pairs if len(set(events)) > 1), min(map(len, split)))
        return [self._event_text(events[at]) if at < len(events) else "no further unit" for events in split]

    def _event_text(self, event: tuple[int, ...]) -> str:
        first, *missing = event
        names = self.names[first // 2]
        if not first % 2:
            return f"gathers {names.unit}"
        without = ", ".join(names.parameters[-1 - number] for number in missing)
        return f"reduces {names.unit}" + (f" without gradients of {without}" if without else "")


class UnitOrderRecorder:
    """Records the units that this rank has gathered and reduced since `take_events`, in order.

    is_in_loss: whether the loss of a step is computed, in which no backward may run
    is_evaluated: whether the model is evaluated by this package, which reshards it once, at the end
    is_trained: whether the model is that of a loop, whose backward runs within a step
    awaits_backward: whether a forward with gradients came after the last reduction
    shards: sharded parameter -> its storage, its local part, and whether it was trained then
    """

    def __init__(self, names: Sequence[UnitAndParameterNames]) -> None:
        self.is_in_loss = self.is_evaluated = self.is_trained = self.awaits_backward = False
        self.shards = dict[Any, tuple[torch.UntypedStorage, weakref.ref[Tensor], bool]]()
        self._names = names
        self._numbers = deque[int](maxlen=_MOST_NUMBERS)

    def note_gather(self, unit: int) -> None:
        self._numbers.append(2 * unit)

    def note_reduction(self, unit: int, *, without: Iterable[int]) -> None:
        """Notes a reduction of all gradients of a unit, except of its parameters `without`."""
        self.awaits_backward = False
        self._numbers.append(2 * unit + 1)
        self._numbers.extend(-1 - index for index in without)

    def note_scalar_reduction(self, *, without: Iterable[int]) -> None:
        """Notes a reduction of the parameters that are in no unit, the last of the names."""
        self.note_reduction(len(self._names) - 1, without=without)

    def take_events(self) -> UnitEvents:
        events = UnitEvents(self._names, array("q", self._numbers))
        self._numbers.clear()
        return events

    def last_unit_name(self) -> str:
        """Returns the name of the unit that was gathered or reduced last, or an empty text."""
        numbers = self._numbers.copy()  # the watchdog's thread calls this, while a step may continue
        last = next((number for number in reversed(numbers) if number >= 0), None)
        return "" if last is None else self._names[last // 2].unit


def attach_unit_order_recorder(model: nn.Module, order: UnitOrderRecorder) -> None:
    """Makes `find_unit_order_recorder` of the model return `order`."""
    setattr(model, _ATTRIBUTE, order)


def find_unit_order_recorder(model: nn.Module) -> UnitOrderRecorder | None:
    """Returns the recorder of the units of a sharded model; None for any other model."""
    return getattr(model, _ATTRIBUTE, None)


def take_unit_events(model: nn.Module) -> UnitEvents:
    """Returns the events of the model's units since the last call; none if it is not sharded."""
    order = find_unit_order_recorder(model)
    return UnitEvents((), array("q")) if order is None else order.take_events()


def _split_into_events(numbers: "array[int]") -> list[tuple[int, ...]]:
    """Returns the events: each number of a unit, with the missing parameters that follow it."""
    found: list[tuple[int, ...]] = []
    for number in numbers:
        if number < 0 and found:
            found[-1] = (*found[-1], number)
        else:
            found.append((number,))
    return found
