"""Prediction: what a plan is said to need and to take, term by term."""

from typing import Annotated, Literal

from pydantic import Field

from fullshard.spec.memory import MemoryTerms
from fullshard.spec.value import FrozenModel, Large, NonNegativeFloat, PositiveFloat, PositiveInt


class TimeTerms(FrozenModel):
    """Seconds of one optimizer step on the slowest rank; `total` is their sum.

    compute                 forward and backward kernels, with the gaps in which the device waits for the host
    recompute               of backward, what is computed a second time
    exposed_all_gather      waiting for parameters that are not there yet
    exposed_reduce_scatter  waiting for gradients that are still being reduced over shards
    exposed_all_reduce      the same, over replicas, and for the loss
    engine                  copies in and out of the collectives' buffers
    contention              what computing loses to collectives that run beside it
    tensor_parallel         collectives between the matmuls of a block: computing waits for each
    optimizer               clipping and the update
    offload                 by how much the step is longer than with an infinitely fast host and drive: their
                            copies (activations' too) and the update there, as far as nothing hides them
    stragglers              waiting for the slowest rank
    """

    compute: NonNegativeFloat = 0.0
    recompute: NonNegativeFloat = 0.0
    exposed_all_gather: NonNegativeFloat = 0.0
    exposed_reduce_scatter: NonNegativeFloat = 0.0
    exposed_all_reduce: NonNegativeFloat = 0.0
    engine: NonNegativeFloat = 0.0
    contention: NonNegativeFloat = 0.0
    tensor_parallel: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat = 0.0
    offload: NonNegativeFloat = 0.0
    stragglers: NonNegativeFloat = 0.0

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """The terms by name, in the order of the fields."""
        return {name: float(value) for name, value in self}


class OffloadTerms(FrozenModel):
    """What a tier takes of one rank's host and drive. Bytes that are held there, bytes of one step, and the
    seconds of one step that each of the three is busy at least; the step is no shorter than the longest.
    `update_seconds`: of the host, or, of an update in the device's memory, of the device; what passes there
    and back is among the copies.

    `disk_read_bytes`, `disk_written_bytes`: of one step (with `offload.order = "alternate"` of the one of two
    that reads more); what is written wears the drive.
    `disk_seconds` None: how fast the drive is is not known, and the step's seconds are those without it.
    `host_capacity_bytes`: a rank's share of the host's memory; None: not known.
    """

    host_bytes: Large = 0
    disk_bytes: Large = 0
    disk_read_bytes: Large = 0
    disk_written_bytes: Large = 0
    disk_seconds: NonNegativeFloat | None = 0.0
    update_seconds: NonNegativeFloat = 0.0
    copy_seconds: NonNegativeFloat = 0.0
    host_capacity_bytes: PositiveInt | None = None

    @property
    def fits(self) -> bool:
        return self.host_capacity_bytes is None or self.host_bytes <= self.host_capacity_bytes

    @property
    def binds(self) -> Literal["disk", "update", "copies"]:
        """Which of the three bounds the step from below; of what is known."""
        longest = max(self.disk_seconds or 0.0, self.update_seconds, self.copy_seconds)
        if self.disk_seconds == longest:
            return "disk"
        return "update" if self.update_seconds == longest else "copies"


class ActivationTerms(FrozenModel):
    """What activations that are saved on the host take of one rank's: `host_bytes` that are held there at
    most, `copied_bytes` of one step in each of the two directions, and the seconds of both.
    """

    host_bytes: Large = 0
    copied_bytes: Large = 0
    copy_seconds: NonNegativeFloat = 0.0
    host_capacity_bytes: PositiveInt | None = None


class Prediction(FrozenModel):
    """What is said of a plan before it runs.

    Of the fullest rank: `memory` are live tensors (`max_memory_allocated`); with `allocator_reserve_bytes`
    they are what the allocator takes of the device (`max_memory_reserved`); with `context_bytes`, all that
    the process needs, which must not pass `capacity_bytes`. `offload`: of its host and drive, where the plan
    has a tier; `activations`: of its host, where blocks save there. `flops_per_token`: of the model; see
    `fullshard.spec.measurement.model_flops_per_token`. `mfu` is None where the chip's peak is not known.
    """

    hardware: str
    memory: MemoryTerms
    allocator_reserve_bytes: Large = 0
    context_bytes: Large = 0
    capacity_bytes: PositiveInt
    offload: OffloadTerms | None = None
    activations: ActivationTerms | None = None
    time: TimeTerms
    tokens_per_step: Annotated[Large, Field(gt=0)]
    tokens_per_second: PositiveFloat
    flops_per_token: PositiveFloat | None = None
    mfu: PositiveFloat | None = None

    @property
    def reserved_bytes(self) -> int:
        return self.memory.total + self.allocator_reserve_bytes

    @property
    def needed_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes

    @property
    def is_timed(self) -> bool:
        """Whether `time` is all of a step's: with its drive."""
        return self.offload is None or self.offload.disk_seconds is not None

    @property
    def host_bytes(self) -> int:
        return sum(one.host_bytes for one in (self.offload, self.activations) if one is not None)

    @property
    def fits(self) -> bool:
        return host_fits(self.offload, self.activations) and self.needed_bytes <= self.capacity_bytes


def host_fits(*terms: OffloadTerms | ActivationTerms | None) -> bool:
    """Whether all of them together have room on the host, as far as is known how much it has."""
    known = [one for one in terms if one is not None]
    held = sum(one.host_bytes for one in known)
    return all(one.host_capacity_bytes is None or held <= one.host_capacity_bytes for one in known)
