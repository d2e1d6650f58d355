"""Measurement: the measured results of a run, and the definition of MFU."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, computed_field, model_validator

from fullshard.quantities import count_text, format_seconds
from fullshard.spec.machine.hardware import ComputeDtype
from fullshard.spec.prediction import SecondsByCause
from fullshard.spec.run import Strategy
from fullshard.spec.value import FrozenModel, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fullshard.system.files import write_file_atomically


def none_if_not_finite(value: Any) -> Any:
    """Returns None for NaN and infinity, which JSON does not have, and other values unchanged.

    The last step may have been skipped for its loss; the other measurements must still be saved.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(none_if_not_finite)]


class GradientShares(NamedTuple):
    """Shares of a model's matrices, by elements, in which backward computes gradients; both 1 if all train.

    inputs: those that get gradients of their inputs: from the first trained parameter on
    own: those that are trained
    """

    inputs: float = 1.0
    own: float = 1.0

    def forward_and_backward_flop(self, *, matmul: float, attention: float) -> float:
        """Returns the FLOP of a forward and a backward. `matmul`, `attention`: those of the forward."""
        return matmul * (1 + self.inputs + self.own) + attention * (1 + 2 * self.inputs)


ALL_GRADIENTS = GradientShares()


def model_flops_per_token(
    parameters: int,
    *,
    layers: int,
    d_model: int,
    sequence_length: int,
    gradients: GradientShares = ALL_GRADIENTS,
) -> float:
    """Returns the FLOP of one token, forward and backward. PaLM, arXiv:2204.02311, appendix B:

        6 * parameters + 12 * layers * d_model * sequence_length

    for a model that trains all of its parameters. Gradients that frozen parameters save are left out.

    parameters: number of parameters that every token is multiplied with: all except the input embedding
        table, which counts only if it is also the head
    d_model: query heads * head size

    Attention counts all pairs of positions, as in the paper, although a causal kernel computes half of them.
    MFU is therefore comparable with published figures, and too high at long sequences. Recompute is excluded.
    """
    attention = 4 * layers * d_model * sequence_length
    return gradients.forward_and_backward_flop(matmul=2 * parameters, attention=attention)


class MatmulPeak(FrozenModel):
    """Peak dense matmul FLOP/s of one rank, the reference of MFU.

    source: the catalog (`device` is the chip's name there), or a measurement at the start of the run
    """

    flops_per_second: PositiveFloat
    dtype: ComputeDtype
    source: Literal["catalog", "measured"]
    device: str


def peak_tokens_per_second(peak: MatmulPeak, *, flops_per_token: float, world_size: int) -> float:
    """Returns the tokens/s of all ranks at which MFU is 1."""
    return world_size * peak.flops_per_second / flops_per_token


class Throughput(FrozenModel):
    """Sums of a run's tokens and seconds, from which its speed follows.

    warmup_steps: number of first steps that are not timed
    steps: all steps, including warmup
    untimed_steps: steps after the warmup that are excluded because measuring slowed them
    tokens: tokens that all ranks computed in the timed steps, as `Prediction.tokens_per_step` counts them
    trained_tokens: those of `tokens` whose label counts in the loss. None if the loss is a mean, and in files
        of earlier versions, where `tokens` are the trained ones.
    seconds: seconds of the timed steps
    data_seconds: the part of `seconds` spent waiting for data
    """

    warmup_steps: NonNegativeInt = 5
    steps: NonNegativeInt = 0
    untimed_steps: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    trained_tokens: NonNegativeInt | None = None
    seconds: NonNegativeFloat = 0.0
    data_seconds: NonNegativeFloat = 0.0

    def with_step(
        self,
        *,
        tokens: int,
        trained_tokens: int | None,
        seconds: float,
        data_seconds: float = 0.0,
        is_slowed: bool = False,
    ) -> "Throughput":
        """Returns the sums after one more step.

        is_slowed: True excludes the step's time, because the memory meter or the profiler slowed the step
        """
        warm = self.steps >= self.warmup_steps
        timed, trained = warm and not is_slowed, self.trained_tokens
        if trained is not None:
            trained = None if trained_tokens is None else trained + timed * trained_tokens
        return Throughput(
            warmup_steps=self.warmup_steps,
            steps=self.steps + 1,
            untimed_steps=self.untimed_steps + (warm and is_slowed),
            tokens=self.tokens + timed * tokens,
            trained_tokens=trained,
            seconds=self.seconds + timed * seconds,
            data_seconds=self.data_seconds + timed * data_seconds,
        )

    @property
    def timed_steps(self) -> int:
        return max(0, self.steps - self.warmup_steps - self.untimed_steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s of all ranks; None before the first timed step."""
        return self.tokens / self.seconds if self.seconds and self.timed_steps else None

    @property
    def trained_share(self) -> float | None:
        """`trained_tokens` / `tokens`; None if it is not known."""
        return None if self.trained_tokens is None or not self.tokens else self.trained_tokens / self.tokens

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the timed steps; None before the first."""
        return self.seconds / self.timed_steps if self.timed_steps else None


class StepSeconds(SecondsByCause):
    """Measured seconds of one step by cause. See `fullshard.report.profiled_step`.

    compute                 forward and backward (including recompute); on CUDA, while one of its kernels runs
    model_parallel          waiting for ranks that share work, while nothing is computed
    exposed_all_gather      waiting for parameters, while nothing is computed
    exposed_reduce_scatter  waiting for gradients that are reduced over shards, while nothing is computed
    exposed_all_reduce      waiting for all-reduces over replicas, of the loss and of the norm
    engine                  copies in and out of the collectives' buffers; on the CPU, all of FSDP2's own work
    optimizer               the norm, clipping and the update
    data                    waiting for the batch
    other                   the remainder; on CUDA, including gaps in which the device waits for the host
    """

    compute: NonNegativeFloat = 0.0
    model_parallel: NonNegativeFloat = 0.0
    exposed_all_gather: NonNegativeFloat = 0.0
    exposed_reduce_scatter: NonNegativeFloat = 0.0
    exposed_all_reduce: NonNegativeFloat = 0.0
    engine: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat = 0.0
    data: NonNegativeFloat = 0.0
    other: NonNegativeFloat = 0.0

    @property
    def exposed_collective_seconds(self) -> float:
        sharded = self.exposed_all_gather + self.exposed_reduce_scatter + self.exposed_all_reduce
        return self.model_parallel + sharded

    def scaled_to(self, total: float) -> "StepSeconds":
        """Returns the terms scaled so that they sum to `total`: term · total / self.total."""
        factor = total / self.total if self.total else 0.0
        return StepSeconds(**{name: value * factor for name, value in self.terms().items()})


class MemoryParts(FrozenModel):
    """Bytes of live tensors on one rank at the peak, by kind.

    parameter_shards (trained), frozen_shards, gradients, optimizer_state, parameter_averages: the rank's own
    units_in_flight: unsharded parameters and the buffers of collectives; in `rest` on CUDA, whose allocator
        does not distinguish them
    rest: batch, activations, unreduced gradients of a unit, temporaries
    """

    parameter_shards: NonNegativeInt
    frozen_shards: NonNegativeInt = 0
    gradients: NonNegativeInt
    optimizer_state: NonNegativeInt
    parameter_averages: NonNegativeInt = 0
    buffers: NonNegativeInt
    units_in_flight: NonNegativeInt
    rest: NonNegativeInt

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns the bytes by part, in the order of the fields."""
        return {name: getattr(self, name) for name in MemoryParts.model_fields}


class PeakBytes(MemoryParts):
    """Peak memory of the rank that uses most: bytes by kind, and figures of CUDA and of the host.

    allocated: CUDA only: bytes that the allocator assigned to tensors
    reserved: CUDA only: bytes that the allocator reserved from the device
    host: bytes of host memory of the offload target, on the rank that uses most; None without an offload
        target. On CPU ranks, this includes the master weights, which are the shards that are gathered.
    """

    allocated: NonNegativeInt | None = None
    reserved: NonNegativeInt | None = None
    host: NonNegativeInt | None = None


class DriveTrafficBytes(FrozenModel):
    """Bytes that one rank reads from and writes to its offload drive in one step."""

    read: NonNegativeInt
    written: NonNegativeInt


class Compilation(FrozenModel):
    """Counts of what torch.compile did on rank 0.

    blocks, eager_blocks: number of blocks that run compiled, and that could not be compiled and run eagerly
    graphs: distinct graphs; equal blocks share one
    graph_breaks: places at which the compiler gave up and went on with a new graph
    recompilations: graphs compiled anew, for other shapes or settings
    seconds: seconds in the compiler
    """

    blocks: NonNegativeInt
    eager_blocks: NonNegativeInt = 0
    graphs: NonNegativeInt
    graph_breaks: NonNegativeInt
    recompilations: NonNegativeInt
    seconds: NonNegativeFloat

    def format_text(self) -> str:
        """Returns `36 blocks: 1 graph, 0 graph breaks, 0 recompilations, 41 s`."""
        eager = f" ({self.eager_blocks} more run eagerly)" if self.eager_blocks else ""
        counts = {
            "graph": self.graphs,
            "graph break": self.graph_breaks,
            "recompilation": self.recompilations,
        }
        each = ", ".join(count_text(count, name) for name, count in counts.items())
        return f"{count_text(self.blocks, 'block')}{eager}: {each}, {format_seconds(self.seconds)}"


class Measurement(FrozenModel):
    """Measured results of the steps of a run that one command made, in `<run.dir>/measurement.json`.

    The JSON also contains the computed rates, which `load` ignores.

    offload: the offload target, with its location if it is a drive; None without an offload target
    drive: bytes that rank 0 moved in the median step, from its update to the next
    first_step: number of the first step of this command (1 for a new run)
    repeated_steps: steps that a rollback undid; `pace` also counts them
    first_loss, last_loss, validation_loss: nats per token, except for `has_own_loss`: with `train.loss`
    results: the last result of each evaluation, by name, with that of the validation
    flops_per_token: see `model_flops_per_token`
    step_seconds: mean timed step of `pace`, divided into causes as in the least disturbed profiled step on
        the slowest rank (the rank that waited least for collectives). None if no step was profiled or timed.
    startup_seconds: seconds from the command to the end of its first step
    compilation: what torch.compile did; None if nothing was compiled
    """

    directory: str
    strategy: Strategy
    world_size: PositiveInt
    device: str
    offload: str | None = None
    drive: DriveTrafficBytes | None = None
    first_step: PositiveInt
    pace: Throughput
    skipped_steps: NonNegativeInt = 0
    repeated_steps: NonNegativeInt = 0
    first_loss: FiniteOrNone = None
    last_loss: FiniteOrNone = None
    validation_loss: FiniteOrNone = None
    has_own_loss: bool = False
    results: Mapping[str, FiniteOrNone] = Field(default_factory=dict[str, FiniteOrNone])
    flops_per_token: Annotated[float, Field(gt=0)] | None = None
    peak: MatmulPeak | None = None
    peak_bytes: PeakBytes | None = None
    step_seconds: StepSeconds | None = None
    startup_seconds: NonNegativeFloat | None = None
    compilation: Compilation | None = None
    checkpoint: str | None = None

    @computed_field
    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s of all ranks."""
        return self.pace.tokens_per_second

    @computed_field
    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation; None if the speed, the FLOP per token or the peak is unknown."""
        rate, flops, peak = self.tokens_per_second, self.flops_per_token, self.peak
        if rate is None or flops is None or peak is None:
            return None
        return rate / peak_tokens_per_second(peak, flops_per_token=flops, world_size=self.world_size)

    @property
    def last_step(self) -> int:
        return self.first_step + self.pace.steps - self.repeated_steps - 1

    @model_validator(mode="before")
    @classmethod
    def _drop_computed_rates(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        rates = {*cls.model_computed_fields, "tokens_per_second_per_rank"}  # the latter: in older files
        return {key: value for key, value in data.items() if key not in rates}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a measurement that `save` wrote. Raises SpecError for any other file."""
        return cls.read_json(path, what="a saved measurement", ignores_unknown=True)

    def save(self, path: str | Path) -> None:
        """Writes JSON atomically. Raises OSError."""
        write_file_atomically(Path(path), self.model_dump_json(indent=2) + "\n")
