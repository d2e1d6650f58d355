"""Result of a dry run."""

from fullshard.spec.value import FrozenModel


class DryRun(FrozenModel):
    """Bytes of live tensors on one rank at the highest moment of a step, by part; `peak_bytes` is their sum.

    The step is the second one, because the first creates the optimizer state. The parts mean the same as
    those of a measurement (`fullshard.profiler.memory.MemoryParts`).

    moment: the phase in which the peak was reached.
    parameter_shards: bytes of the rank's parameter shards.
    gradients: bytes of its sharded gradients.
    optimizer_state: bytes of its optimizer state.
    buffers: bytes of the module's buffers.
    units_in_flight: bytes of unsharded parameters and of collectives' buffers.
    rest: bytes of the batch, activations, unsharded gradients and temporaries.
    optimizer_step_bytes: peak during the optimizer step.
    allocated_bytes: the most bytes that CUDA's caching allocator would report as allocated for these tensors
        (`fullshard.dryrun.allocator`); 0 for a CPU plan.
    reserved_bytes: the most bytes that it would report as reserved; 0 for a CPU plan.
    """

    moment: str
    parameter_shards: int
    gradients: int
    optimizer_state: int
    buffers: int
    units_in_flight: int
    rest: int
    optimizer_step_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns bytes by part, in the order of the fields."""
        names = (
            *("parameter_shards", "gradients", "optimizer_state", "buffers"),
            *("units_in_flight", "rest"),
        )
        return {name: getattr(self, name) for name in names}
