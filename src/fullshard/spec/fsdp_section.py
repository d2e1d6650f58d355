"""The section [fsdp] of run.toml."""

from typing import Self

from pydantic import model_validator

from fullshard.spec.value import FrozenModel, PositiveCount


class FsdpSection(FrozenModel):
    """Settings of FSDP2's communication for clusters, off by default. Each needs a torch that has it.

    `separate_reduce_scatter_group`: a communicator of their own for reduce-scatters, which then run beside
        all-gathers (torch 2.13)
    `reduce_scatter_buffers`: number of units whose gradients may be in reduction before computing waits; each
        has a buffer (torch 2.13)
    `symmetric_memory`: all-gathers through NCCL's symmetric memory (torch 2.12, GPUs)
    `allocate_from_process_group`: buffers of collectives from NCCL's allocator, for zero-copy sends (GPUs)
    """

    separate_reduce_scatter_group: bool = False
    reduce_scatter_buffers: PositiveCount = 1
    symmetric_memory: bool = False
    allocate_from_process_group: bool = False

    @model_validator(mode="after")
    def _check_buffers_have_one_owner(self) -> Self:
        if self.symmetric_memory and self.allocate_from_process_group:
            raise ValueError(
                "symmetric_memory and allocate_from_process_group both allocate the same buffers"
            )
        if self.symmetric_memory and self.reduce_scatter_buffers > 1:
            raise ValueError("symmetric_memory has one reduce-scatter buffer: reduce_scatter_buffers = 1")
        return self
