"""MemoryTerms: the predicted peak of one rank, as a sum of named terms."""

from fullshard.spec.value import FrozenModel


class MemoryTerms(FrozenModel):
    """Bytes of live tensors on one rank at the peak of a step; `total` is their sum.

    P parameters, N shards; all of it padded so that dim 0 divides by N. See `fullshard.planner.memory` for
    the derivation of each.

    parameter_shards     P · master / N
    gradients            P · master / N once all units are reduced; less during backward
    optimizer_state      optimizer state of the rank's own shards: 2 · P · master / N for AdamW; for an
    offload
                         target that is updated on the device, the buffers that state passes through
    buffers              the module's buffers, whole on every rank
    batch                the microbatch itself
    units_in_flight      gathered parameters, and the buffers of all-gather, reduce-scatter and all-reduce
    whole_gradients      gradients of whole units before they are reduced
    activations          results of the units' forward passes that backward still needs
    loss                 results of the loss (fp32 logits are most of it)
    backward             gradients of activations, and recomputed activations
    """

    moment: str
    parameter_shards: int
    gradients: int = 0
    optimizer_state: int
    buffers: int
    batch: int = 0
    units_in_flight: int = 0
    whole_gradients: int = 0
    activations: int = 0
    loss: int = 0
    backward: int = 0
    workspace: int = 0
    stream_pools: tuple[int, int, int] = (0, 0, 0)

    @property
    def total(self) -> int:
        return sum(self.terms().values())

    @property
    def staged_bytes(self) -> int:
        """Host memory of the copy from which a background checkpoint is written."""
        return self.parameter_shards + self.optimizer_state

    def terms(self) -> dict[str, int]:
        """Returns the terms by name, in the order of the fields."""
        return {name: value for name, value in self if isinstance(value, int)}
