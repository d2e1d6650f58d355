"""Small states to save and load, whole in one process or sharded over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import (
    SavedTensor,
    check_same_tensors,
    checkpoint_files_at,
    read_manifest,
    read_verified_file,
)
from fullshard.checkpoint.save import save
from fullshard.checkpoint.shard_file import ShardFileTable
from fullshard.system.direct_io import LARGE_BYTES


@dataclass
class State:
    """`held` are its tensors; those named `….rank<n>` belong to one rank alone."""

    step: int
    held: dict[str, Tensor]
    noted: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.held)

    def values(self) -> dict[str, Any]:
        return {"step": self.step, **self.noted}

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        local = {name: tensor for name, tensor in self.held.items() if name in saved or ".rank" not in name}
        check_same_tensors(
            local, {name: entry for name, entry in saved.items() if name in local or ".rank" not in name}
        )
        return {name: torch.zeros_like(tensor) for name, tensor in local.items()}

    def load_values(self, values: Mapping[str, Any], received: Mapping[str, Tensor]) -> None:
        self.held |= received
        self.noted = {name: value for name, value in values.items() if name != "step"}
        self.step = values["step"]


def numbers(step: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor that a run saves, with numbers that differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.uneven": torch.randn(7, 5, generator=generator),
        "model.few_rows": torch.randn(2, 3, generator=generator).bfloat16(),
        "model.columns": torch.randn(3, 6, generator=generator),
        "model.everywhere": torch.randn(4, generator=generator, dtype=torch.float64),
        "model.scalar": torch.randn((), generator=generator),
        "model.nothing": torch.empty(0, 4),
        "optimizer.uneven.step": torch.tensor(float(step)),
        "optimizer.count": torch.arange(step, step + 5),
    }


def mixed() -> dict[str, Tensor]:
    """Small and large, of sizes that are no multiple of anything, and one of many digests."""
    generator = torch.Generator().manual_seed(0)
    return {
        "small": torch.randn(7, 5, generator=generator),
        "large": torch.randn(515, 513, generator=generator),
        "nothing": torch.empty(0, 4),
        "just_not_large": torch.randint(256, (LARGE_BYTES - 1,), generator=generator).to(torch.uint8),
        "just_large": torch.randint(256, (LARGE_BYTES,), generator=generator).to(torch.uint8),
        "scalar": torch.tensor(2.5),
        "huge": torch.arange(9_000_011, dtype=torch.float32),
        "large_too": torch.randn(1031, 1033, generator=generator).bfloat16(),
        "last": torch.arange(5),
    }


def ones_own(step: int, rank: int) -> Tensor:
    """A tensor that belongs to one rank alone."""
    return torch.full((16,), 10 * step + rank, dtype=torch.uint8)


def sharded(step: int, mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """`numbers` on the ranks of a mesh: sharded over its last axis, replicated over the first of two."""
    whole = numbers(step)
    mesh = init_device_mesh("cpu", mesh_shape)
    copies = [Replicate()] * (len(mesh_shape) - 1)
    placements = {
        "model.uneven": [*copies, Shard(0)],
        "model.few_rows": [*copies, Shard(0)],
        "model.columns": [*copies, Shard(1)],
        "model.everywhere": [*copies, Replicate()],
    }
    tensors = {
        n: distribute_tensor(t, mesh, placements[n]) if n in placements else t for n, t in whole.items()
    }
    tensors[f"random.rank{dist.get_rank()}"] = ones_own(step, dist.get_rank())
    return tensors


def saved_sharded(
    directory: Path | CheckpointLocation,
    step: int,
    mesh_shape: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
) -> Path:
    state = State(step, sharded(step, mesh_shape), {"tokens": step * 100})
    return save(state, directory, **(options or {}))


def loaded_sharded(directory: Path, mesh_shape: tuple[int, ...]) -> tuple[State, dict[str, Tensor]]:
    """Loads into a fresh state; returns its step and values, and every tensor whole."""
    state = State(0, sharded(0, mesh_shape))
    assert load(state, directory)
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.held.items()}
    return State(state.step, {}, state.noted), whole


def saved(directory: Path | CheckpointLocation, step: int, **options: Any) -> Path:
    """Saved by this process alone, which is no rank."""
    return save(State(step, numbers(step), {"tokens": step * 100}), directory, **options)


def loaded(directory: Path) -> State:
    state = State(0, numbers(0))
    assert load(state, directory)
    return state


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises AssertionError if names, dtypes or bits differ."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def table_of(path: Path, name: str = "__0_0.distcp") -> ShardFileTable:
    """The table at the end of a data file."""
    data = read_verified_file(checkpoint_files_at(path), read_manifest(path), name=name)
    return ShardFileTable.model_validate_json(data)
