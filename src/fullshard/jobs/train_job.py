"""The state of a `fullshard train` command on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fullshard.data.batches import TrainingData
from fullshard.jobs.checkpoints import RunCheckpointSaver
from fullshard.jobs.run_directory import RunDirectory
from fullshard.models.build import decoder_flops_per_token
from fullshard.models.loss import Loss
from fullshard.observe.profiles import StepProfiler
from fullshard.observe.run_log import RunLog
from fullshard.observe.stragglers import StragglerWatch
from fullshard.parallel.compile import CompilerTally
from fullshard.parallel.mesh import RankInfo
from fullshard.spec.plan import Plan
from fullshard.spec.records.measurement import MatmulPeak, PeakBytes, StepSeconds, Throughput
from fullshard.system.signals import RecordedSignals
from fullshard.training.loop import Step
from fullshard.training.state import TrainState


@dataclass
class TrainJob:
    """The state of one `fullshard train` command on this rank, from its start to its Measurement."""

    plan: Plan
    ranks: RankInfo
    directory: RunDirectory
    state: TrainState
    data: TrainingData
    loss: Loss
    log: RunLog
    matmul_peak: MatmulPeak
    command_started: float
    first_step: int
    checkpoints: RunCheckpointSaver
    profiler: StepProfiler
    stragglers: StragglerWatch
    pace: Throughput
    skipped_before: int
    compiler: CompilerTally
    reported_compilations: int = 0
    reported_compile_seconds: float = 0.0
    unrecorded_compile_seconds: float = 0.0  # of the step `unrecorded`
    first_loss: float | None = None
    last: Step | None = None
    unrecorded: Step | None = None  # the last step, until its figures are read
    unrecorded_memory: Mapping[str, float] = field(default_factory=dict[str, float])  # at its end
    validation: float | None = None
    peak_bytes: PeakBytes | None = None
    profiled: list[StepSeconds] = field(default_factory=list[StepSeconds])
    slowed: set[int] = field(default_factory=set[int])  # steps that measuring slows down
    startup_seconds: float | None = None
    sample: str | None = None
    repeated_steps: int = 0
    signals: RecordedSignals = field(default_factory=RecordedSignals)


def flops_per_token(plan: Plan, model: nn.Module) -> float | None:
    """Returns FLOPs per token: by formula for the reference decoder, else the plan's prediction, if any."""
    own = decoder_flops_per_token(model, plan.run)
    return own if own is not None or plan.prediction is None else plan.prediction.flops_per_token
