"""Fake ranks: a process group and collectives that allocate like real ones and transfer nothing."""

import importlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.errors import ShardError
from fullshard.sharding.mesh import forget_groups
from fullshard.torch_private.fsdp import replace_chunks

_REGISTERS_FAKE = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_process_group(world_size: int, *, rank: int) -> Generator[None]:
    """Creates the default process group while active, as `rank` of `world_size`. Its collectives do nothing.

    Raises ShardError if a process group already exists, or if torch has no fake process group.
    """
    if dist.is_initialized():
        raise ShardError(
            "a dry run needs a process of its own.",
            got="a process group that is initialised already",
            fix="fullshard.dryrun.process.dry_run, which starts one",
        )
    try:
        importlib.import_module(_REGISTERS_FAKE)
    except ImportError as error:
        got = f"torch {torch.__version__}: {error}"
        raise ShardError("this torch has no fake process group.", got=got) from error
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


class SilentCollective:
    """Collective that allocates the same buffers as FSDP2's and transfers nothing."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # signature: FSDP2's, for all-gather and reduce-scatter
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> None:
        return None


def disable_collectives(model: nn.Module) -> None:
    """Removes the collectives of all units. Those for gloo would send to every rank in turn."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(cast(Any, SilentCollective()))
            module.set_custom_reduce_scatter(cast(Any, SilentCollective()))


@contextmanager
def use_lazy_chunks() -> Generator[None]:
    """Makes `fully_shard` cut only its own chunk of a parameter while active.

    FSDP2 cuts the chunks of all ranks, which takes minutes at 16,384 ranks. Its function that does so is
    replaced; a torch without this function still cuts all chunks.
    """
    with replace_chunks(LazyChunks):
        yield


class LazyChunks:
    """Lazy `torch.chunk(tensor, num_chunks, dim)`, padded to `num_chunks` with empty tensors."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:  # signature: FSDP2's
        self.tensor, self.dim = tensor, dim
        self.rows = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self.rows
        length = min(self.rows, self.tensor.size(self.dim) - begin)
        return self.tensor.narrow(self.dim, begin, length) if length > 0 else self.tensor.new_empty(0)
