"""Prediction: the predicted memory, time and host use of a plan, term by term."""

from typing import Annotated, Literal

from pydantic import Field

from fullshard.spec.settings.train_section import AdapterSection
from fullshard.spec.value import FrozenModel, Large, NonNegativeFloat, PositiveFloat, PositiveInt

# Rates were not measured on this hardware ("none"), or were ("idle"). Earlier versions also wrote "busy".
CalibrationState = Literal["none", "busy", "idle"]
# Marks of seconds that are predicted with such rates.
CALIBRATION_MARKS = {"none": "not calibrated", "busy": "calibrated on a busy machine", "idle": ""}


class MemoryTerms(FrozenModel):
    """Predicted bytes of live tensors on one rank at the peak of a step. See `planner.predict.memory`.

    P: parameters; N: shards; master: bytes per element of a shard. Shards are padded so that N divides dim 0.

    parameter_shards     of trained parameters: P · master / N
    frozen_shards        of frozen parameters, in their own dtype; of packed weights, the packed bytes
    gradients            P · master / N once all units are reduced; less during backward
    optimizer_state      optimizer state of the rank's shards: 2 · P · master / N for AdamW. For an offload
                         target with updates on the device: the buffers that state passes through
    parameter_averages   averages of trained parameters, in fp32: 4 · P / N with ema.decay
    buffers              the module's buffers, whole on every rank
    batch                the microbatch itself
    units_in_flight      gathered parameters, the buffers of all-gather, reduce-scatter and all-reduce, and
                         sharded gradients that wait until the last microbatch for their sum over replicas
    whole_gradients      gradients of whole units before they are reduced
    activations          results of the units' forward passes that backward still needs
    loss                 results of the loss (fp32 logits are most of it)
    backward             gradients of activations, and recomputed activations
    uneven_rows          rows beyond the mean that come to the experts of the fullest rank
    workspace            memory that matmul libraries take from the allocator

    stream_pools: peaks of the compute, all-gather and reduce-scatter streams, which share no memory
    """

    moment: str
    parameter_shards: int
    frozen_shards: int = 0
    gradients: int = 0
    optimizer_state: int
    parameter_averages: int = 0
    buffers: int
    batch: int = 0
    units_in_flight: int = 0
    whole_gradients: int = 0
    activations: int = 0
    loss: int = 0
    backward: int = 0
    uneven_rows: int = 0
    workspace: int = 0
    stream_pools: tuple[int, int, int] = (0, 0, 0)

    @property
    def total(self) -> int:
        return sum(self.terms().values())

    def checkpoint_bytes(self, adapter: AdapterSection) -> int:
        """Returns the bytes on the device that a rank saves, and copies to the host in the background."""
        frozen = 0 if adapter.saves_only_adapters else self.frozen_shards
        return self.parameter_shards + frozen + self.optimizer_state + self.parameter_averages

    def terms(self) -> dict[str, int]:
        """Returns the terms by name, in the order of the fields."""
        return {name: value for name, value in self if isinstance(value, int)}


class SecondsByCause(FrozenModel):
    """Seconds of a training step, with a field for each cause."""

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Returns the terms by name, in the order of the fields."""
        return {name: float(value) for name, value in self}


class TimeTerms(SecondsByCause):
    """Predicted seconds of one optimizer step on the slowest rank, by cause.

    compute                 forward and backward kernels
    recompute               the part of backward that recomputes activations
    launch_gaps             the device waits for the host to launch its next kernel
    exposed_all_gather      waiting for parameters that are not gathered yet
    exposed_reduce_scatter  waiting for gradients that are still being reduced over shards
    exposed_all_reduce      waiting for all-reduces over replicas, and of the loss
    engine                  copies in and out of the collectives' buffers
    contention              slowdown of compute by collectives that run beside it
    model_parallel          collectives of ranks that share sequences, matmuls, experts or Muon: compute waits
    optimizer               clipping and the update
    offload                 extra seconds compared with an infinitely fast host and drive: the exposed part of
                            copies (including activations) and of the update on the host
    stragglers              waiting for the slowest rank
    """

    compute: NonNegativeFloat = 0.0
    recompute: NonNegativeFloat = 0.0
    launch_gaps: NonNegativeFloat = 0.0
    exposed_all_gather: NonNegativeFloat = 0.0
    exposed_reduce_scatter: NonNegativeFloat = 0.0
    exposed_all_reduce: NonNegativeFloat = 0.0
    engine: NonNegativeFloat = 0.0
    contention: NonNegativeFloat = 0.0
    model_parallel: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat = 0.0
    offload: NonNegativeFloat = 0.0
    stragglers: NonNegativeFloat = 0.0


class OffloadTerms(FrozenModel):
    """Predicted use of the host and drive by one rank's offload target.

    Each `_seconds` field is a lower bound: a step takes at least the longest of the three.

    host_bytes, disk_bytes: bytes in host memory and on the drive
    disk_read_bytes, disk_written_bytes: bytes read and written in one step. Written bytes wear the drive.
    disk_seconds: busy seconds of the drive in a step. None if its speed is unknown; predicted step times then
        exclude the drive.
    update_seconds: seconds of the update in a step, on the host, or on the device if it updates there, and of
        the host's sums of gradients and their norm
    copy_seconds: seconds of copies in a step, including state that passes through device memory for an update
    host_capacity_bytes: a rank's share of the host's memory; None if unknown
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
    def step_bottleneck(self) -> Literal["disk", "update", "copies"]:
        """The longest work of the offload target, which bounds the step: disk, update or copies."""
        longest = max(self.disk_seconds or 0.0, self.update_seconds, self.copy_seconds)
        if self.disk_seconds == longest:
            return "disk"
        return "update" if self.update_seconds == longest else "copies"


class ActivationOffloadTerms(FrozenModel):
    """Predicted use of the host by one rank's activations that are saved in host memory.

    host_bytes: largest number of bytes in host memory
    copied_bytes: bytes copied in one step in each direction
    copy_seconds: seconds of copies in both directions in a step
    host_capacity_bytes: a rank's share of the host's memory; None if unknown
    """

    host_bytes: Large = 0
    copied_bytes: Large = 0
    copy_seconds: NonNegativeFloat = 0.0
    host_capacity_bytes: PositiveInt | None = None


class Prediction(FrozenModel):
    """The predicted memory, step time and speed of a plan, for the rank that uses most memory.

    memory: live tensors (`max_memory_allocated`)
    allocator_reserve_bytes: bytes that the allocator reserves (`max_memory_reserved`) beyond `memory`
    context_bytes: bytes of the process on the device outside the allocator
    capacity_bytes: limit on the sum of these three
    offload: use of the host and drive by the plan's offload target; None without one
    activations: use of the host by blocks that save activations there; None without any
    flops_per_token: see `fullshard.spec.records.measurement.model_flops_per_token`
    mfu: model FLOP utilisation; None if the chip's peak is unknown
    compile_seconds: seconds of compiling before the first step, which are not in `time`
    calibration: how the hardware's rates, on which `time` depends, were measured; see `Hardware.calibration`
    """

    hardware: str
    memory: MemoryTerms
    allocator_reserve_bytes: Large = 0
    context_bytes: Large = 0
    capacity_bytes: PositiveInt
    offload: OffloadTerms | None = None
    activations: ActivationOffloadTerms | None = None
    time: TimeTerms
    tokens_per_step: Annotated[Large, Field(gt=0)]
    tokens_per_second: PositiveFloat
    flops_per_token: PositiveFloat | None = None
    mfu: PositiveFloat | None = None
    compile_seconds: NonNegativeFloat = 0.0
    calibration: CalibrationState = "idle"

    @property
    def total_reserved_bytes(self) -> int:
        return self.memory.total + self.allocator_reserve_bytes

    @property
    def required_device_bytes(self) -> int:
        return self.total_reserved_bytes + self.context_bytes

    @property
    def has_complete_step_time(self) -> bool:
        """True if `time` includes the drive of the offload target, whose speed may be unknown."""
        return self.offload is None or self.offload.disk_seconds is not None

    @property
    def host_bytes_per_rank(self) -> int:
        return sum(one.host_bytes for one in (self.offload, self.activations) if one is not None)

    @property
    def fits_in_memory(self) -> bool:
        in_host = fits_in_host_memory(self.offload, self.activations)
        return in_host and self.required_device_bytes <= self.capacity_bytes


def fits_in_host_memory(*terms: OffloadTerms | ActivationOffloadTerms | None) -> bool:
    """Returns True if the terms together fit in one rank's share of host memory, or the share is unknown."""
    known = [one for one in terms if one is not None]
    held = sum(one.host_bytes for one in known)
    return all(one.host_capacity_bytes is None or held <= one.host_capacity_bytes for one in known)
