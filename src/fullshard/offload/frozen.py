"""Shards that nothing updates, outside of the device."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.offload.fsdp_params import dtensor_like, local_shape, shard_dtype
from fullshard.offload.gather_source import SeparateShards


class Frozen:
    """Of one sharded model on one rank: what is there of them, in their own dtype, is in `shards`.

    `engine`: the engine's object of each, by name, in the order of use; `units`: which unit gathers it.
    """

    def __init__(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, shards: SeparateShards
    ) -> None:
        self.engine, self.shards = engine, shards
        self._names: dict[int, list[str]] = {}
        for name in engine:
            self._names.setdefault(units[name], []).append(name)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """The shards, flat, of all of a unit's; others that are among `values` are left out."""
        for name, value in values.items():
            if name in self.engine and value.numel():
                self.shards.write(name, 0, values=value)

    def tensor(self, name: str) -> DTensor:
        """Placed as the parameter is; not to be changed. On a drive it is read when it is used."""
        return dtensor_like(self.engine[name], self.shards.whole(name))

    def refill(self) -> Iterator[dict[str, Tensor]]:
        """A unit at a time: new tensors to be filled, placed as the parameters are; what stands in them when
        the next ones are asked for is taken over. As many on every rank, of the same names."""
        self.shards.begin(backwards=True)  # nobody gathers meanwhile
        for names in self._names.values():
            sizes = {name: local_shape(self.engine[name]).numel() for name in names}
            new = {
                name: torch.empty(size, dtype=shard_dtype(self.engine[name])) for name, size in sizes.items()
            }
            yield {name: dtensor_like(self.engine[name], own) for name, own in new.items()}
            self.put(new)
        self.shards.settle()
