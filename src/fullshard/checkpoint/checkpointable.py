"""Protocols of a state that can be saved and loaded."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from pydantic import JsonValue
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor


class Checkpointable(Protocol):
    """A state that can be saved and loaded; `fullshard.training.state.TrainState` is one.

    Tensors go to data files (each rank writes its own shards of DTensors), values into the manifest.
    """

    @property
    def step(self) -> int:
        """Number of finished steps, equal on all ranks, which names the checkpoint."""
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
        """Returns the tensors to fill from a checkpoint that holds `saved`, equal to it in name, shape and
        dtype.

        Raises CheckpointError that names the differences (see `compare_names`).
        """
        ...

    def load_values(self, values: Mapping[str, JsonValue], received: Mapping[str, Tensor]) -> None:
        """Receives the values, once the load targets are filled."""
        ...


class PartitionedState(Protocol):
    """A state with a part too large for memory, which is filled after the load targets."""

    def partitions(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Yields further tensors to fill, alike on all ranks, each time after the last ones are filled."""
        ...
