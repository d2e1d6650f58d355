"""Frozen shards outside the device."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.offload.fsdp_params import dtensor_like, local_shape, shard_dtype
from fullshard.offload.gather_source import SeparateShards


class Frozen:
    """Frozen parameters of one sharded model on one rank, offloaded in their own dtype.

    engine: FSDP2's object of each, by name, in the order of use
    units: number of the unit that gathers each
    shards: holds the values
    """

    def __init__(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, shards: SeparateShards
    ) -> None:
        self.engine, self.shards = engine, shards
        self._names: dict[int, list[str]] = {}
        for name in engine:
            self._names.setdefault(units[name], []).append(name)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Stores a unit's flat shards: those of all its frozen parameters. Ignores other parameters in
        `values`.
        """
        for name, value in values.items():
            if name in self.engine and value.numel():
                self.shards.write(name, 0, values=value)

    def tensor(self, name: str) -> DTensor:
        """Returns a parameter's values, placed like it; not to be changed. On a drive, a use reads them."""
        return dtensor_like(self.engine[name], self.shards.whole(name))

    def refill(self) -> Iterator[dict[str, Tensor]]:
        """Sets new values, one unit at a time.

        Yields name -> a tensor to fill, placed like the parameter. The content of these tensors is stored
        when the next unit is requested. Every rank gets the same number of units, with the same names.
        """
        self.shards.begin(backwards=True)  # no all-gather runs meanwhile
        for names in self._names.values():
            sizes = {name: local_shape(self.engine[name]).numel() for name in names}
            new = {
                name: torch.empty(size, dtype=shard_dtype(self.engine[name])) for name, size in sizes.items()
            }
            yield {name: dtensor_like(self.engine[name], own) for name, own in new.items()}
            self.put(new)
        self.shards.settle()
