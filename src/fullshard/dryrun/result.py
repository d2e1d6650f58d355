"""DryRun: what a dry run found."""

from fullshard.spec.value import FrozenModel


class DryRun(FrozenModel):
    """Bytes of live tensors on one rank at the highest moment of a step, by part; `peak_bytes` is their sum.

    The step is the second: the first makes the optimizer's state. The parts are those of a measurement
    (`fullshard.profiler.memory.MemoryParts`), and mean the same:

    parameter_shards, gradients, optimizer_state     of the own shards
    buffers                                          the module's
    units_in_flight                                  gathered parameters, and the buffers of collectives
    rest                                             the batch, activations, whole gradients, temporaries

    `moment`: what had begun when the peak was reached. `optimizer_step_bytes`: the peak while the optimizer
    steps. `allocated_bytes`, `reserved_bytes`: the highest that CUDA's caching allocator would tell of both
    (`fullshard.dryrun.allocator`), of the tensors alone; 0 for a plan on the CPU.
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
        """The parts by name, in the order of the fields."""
        names = (
            *("parameter_shards", "gradients", "optimizer_state", "buffers"),
            *("units_in_flight", "rest"),
        )
        return {name: getattr(self, name) for name in names}
