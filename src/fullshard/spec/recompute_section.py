"""The section [recompute] of a run."""

from typing import Literal, Self

from pydantic import model_validator

from fullshard.spec.value import FrozenModel, NonNegativeScalar, PositiveCount


class RecomputeSection(FrozenModel):
    """Settings of activation checkpointing: which activations are recomputed or offloaded to host memory.

    `mode`: `full` recomputes every block; `every`, every k-th block; `selective` saves attention and every
        `save_matmuls`-th matmul of a block, and recomputes the rest; `offload` saves activations in host
        memory. `auto`: the planner's choice, never `offload`, because no GPU has been timed with it.
    `every`: recomputes (or offloads) the first of this many consecutive blocks; unset, 2 for `every` and 1
        (all) for `offload`, whose last block stays on the device, because its backward comes first
    `blocks`: with `full` or `selective`, the number of blocks that recompute, the first ones; unset, all
    `offload_min_fraction`: tensors under this fraction of a block's input (any microbatch) stay on the device
    """

    mode: Literal["auto", "none", "full", "every", "selective", "offload"] = "auto"
    every: PositiveCount | None = None
    blocks: PositiveCount | None = None
    save_matmuls: PositiveCount = 1
    offload_min_fraction: NonNegativeScalar = 1 / 32

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.blocks is not None and self.mode not in ("full", "selective"):
            raise ValueError(f'blocks = {self.blocks} needs mode = "full" or "selective", not "{self.mode}"')
        return self

    @property
    def block_period(self) -> int:
        """Number of consecutive blocks of which the first is recomputed or offloaded."""
        if self.mode == "every":
            return self.every or 2
        return self.every or 1 if self.mode == "offload" else 1

    @property
    def mode_text(self) -> str:
        """The mode, with `blocks` if it is set: `full`, or `full of 24 blocks`."""
        return self.mode if self.blocks is None else f"{self.mode} of {self.blocks} blocks"

    def applies_to(self, position: int) -> bool:
        """Returns whether the mode is that of the block at `position`, from 0."""
        return position % self.block_period == 0 and (self.blocks is None or position < self.blocks)
