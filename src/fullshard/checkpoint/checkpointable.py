"""What a state offers and takes, so that it can be saved and loaded."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from pydantic import JsonValue
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor


class Checkpointable(Protocol):
    """A state that can be saved and loaded; `fullshard.training.state.TrainState` is one.

    Tensors go to the shards (DTensors each rank its own part), values into the manifest.
    """

    @property
    def step(self) -> int:
        """Finished steps; the same on all ranks. It names the checkpoint."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Flat name -> Tensor or DTensor. A tensor of one rank alone carries the rank in its name; any other
        plain tensor is the same on all ranks, and one of them writes it."""
        ...

    def values(self) -> dict[str, JsonValue]:
        """Small values, the same on all ranks. `tied`: {alias: name} tells `export` of tied parameters."""
        ...

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """The tensors to fill from a checkpoint that holds `saved`; names, shapes and dtypes as saved.

        Raises CheckpointError that names the differences (see `compare_names`).
        """
        ...

    def load_values(self, values: Mapping[str, JsonValue], received: Mapping[str, Tensor]) -> None:
        """Called once the receivers are filled."""
        ...


class PartitionedState(Protocol):
    """A state of which a part is too large for memory: it is filled after the `receivers`."""

    def partitions(self, saved: Mapping[str, SavedTensor]) -> Iterator[dict[str, Tensor]]:
        """Further tensors to fill; the next ones are asked for when these are. On every rank there are as
        many portions, of the same names."""
        ...
