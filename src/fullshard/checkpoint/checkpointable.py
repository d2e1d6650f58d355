"""Protocols of a state that can be saved and loaded."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from pydantic import JsonValue
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor


class Checkpointable(Protocol):
    """A state that can be saved and loaded; `fullshard.training.state.TrainState` is one.

    Tensors go to data files (each rank writes its own shards of DTensors), values into the manifest.
    """

    @property
    def step(self) -> int:
        """Number of finished steps, equal on all ranks; the checkpoint is named by it."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns the Tensors and DTensors to save, by flat name.

        A tensor that belongs to one rank alone carries the rank in its name. Any other plain tensor is equal
        on all ranks, and one of them writes it.
        """
        ...

    def values(self) -> dict[str, JsonValue]:
        """Returns small values, equal on all ranks; `tied` holds {alias: name} of tied parameters."""
        ...

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Returns the tensors to fill from a checkpoint of the tensors `saved`, with their shapes and dtypes.

        Raises CheckpointError that names the differences (see `check_same_tensors`).
        """
        ...

    def load_values(self, values: Mapping[str, JsonValue], received: Mapping[str, Tensor]) -> None:
        """Takes over the saved values, and `received`, the load targets, which are filled now."""


@runtime_checkable
class StateWithFiniteTensors(Protocol):
    """A state some of whose tensors must be finite to train on; others, such as masks, may hold infinity."""

    def select_finite_tensors(self, names: Iterable[str]) -> Collection[str]:
        """Returns those of `names` whose tensors must be finite; otherwise, the state is not saved."""
        ...


@runtime_checkable
class StateLoadedInPortions(Protocol):
    """A state with tensors too large for memory, which are loaded in portions after the load targets."""

    def iterate_load_targets(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields portions of tensors to fill, equal on all ranks. The caller fills each before the next."""
        ...
