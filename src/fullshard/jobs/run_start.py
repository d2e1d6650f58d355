"""The state of a run on its ranks, and its start: directory, model, data, checkpoint and log."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard.checkpoint.location import iterate_complete_checkpoints, location_of, newest_complete_step
from fullshard.data.batches import MicrobatchPrefetcher, TrainingData
from fullshard.data.build import build_data
from fullshard.distributed.agreement import all_gather_object, run_on_rank_zero
from fullshard.distributed.ranges import run_own_clock
from fullshard.errors import CheckpointError
from fullshard.jobs.checkpoints import RunCheckpointSaver
from fullshard.jobs.evaluations import RunEvaluation, build_evaluations, evaluation_lines
from fullshard.jobs.out_of_memory import OutOfMemoryReporter
from fullshard.jobs.run_directory import LaunchId, RunDirectory, open_run_directory
from fullshard.launch.detect import detect_hardware
from fullshard.models import build
from fullshard.models.adapters import warn_of_unexpected_adapter_targets
from fullshard.models.loss import Loss, choose_loss
from fullshard.models.packed_weights import count_elements, describe_packing
from fullshard.observe.clock import find_matmul_peak
from fullshard.observe.profiles import StepProfiler
from fullshard.observe.run_log import RunLog, open_run_log, record_attempt_start
from fullshard.observe.stragglers import StragglerWatch
from fullshard.offload.directories import SavedRunState, find_saved_run_state
from fullshard.parallel.compile import CompilerTally, count_compilation
from fullshard.parallel.fp8 import find_weight_scales
from fullshard.parallel.mesh import RankInfo
from fullshard.quantities import count_text, format_bytes, format_count
from fullshard.spec.model import fp8_summary_text
from fullshard.spec.plan import DeviceType, Plan, other_rank_count_error
from fullshard.spec.records import measurement
from fullshard.spec.records.run_files import LAUNCH
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.system.process import RecordedSignals
from fullshard.training.extra_state import seed_generators
from fullshard.training.groups import group_lines
from fullshard.training.loop import Step
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import (
    check_can_continue,
    find_pretrained_directory,
    restore_train_state,
    set_next_row_and_describe_changes,
)
from fullshard.training.shard import discard_offloaded_files, rank_offload_directory, shard
from fullshard.training.state import TrainState
from fullshard.weights.export_peft import describe_impossible_exports

_GUESSING = 0.9  # of ln(vocabulary); trained models are far below on text that they know


@dataclass
class TrainJob:
    """The state of one `fullshard train` command on this rank, from its start to its Measurement."""

    plan: Plan
    ranks: RankInfo
    directory: RunDirectory
    state: TrainState
    data: TrainingData
    evaluations: Sequence[RunEvaluation]
    loss: Loss
    log: RunLog
    matmul_peak: measurement.MatmulPeak
    command_started: float
    first_step: int
    checkpoints: RunCheckpointSaver
    profiler: StepProfiler
    stragglers: StragglerWatch
    pace: measurement.Throughput
    skipped_before: int
    compiler: CompilerTally
    reported_compilations: int = 0
    reported_compile_seconds: float = 0.0
    unrecorded_compile_seconds: float = 0.0  # of the step `unrecorded`
    first_loss: float | None = None
    last: Step | None = None
    unrecorded: Step | None = None  # the last step, until its figures are read
    unrecorded_memory: Mapping[str, float] = field(default_factory=dict[str, float])  # at its end
    results: dict[str, float] = field(default_factory=dict[str, float])  # the last of each evaluation
    peak_bytes: measurement.PeakBytes | None = None
    profiled: list[measurement.StepSeconds] = field(default_factory=list[measurement.StepSeconds])
    slowed: set[int] = field(default_factory=set[int])  # steps that measuring slows down
    startup_seconds: float | None = None
    repeated_steps: int = 0
    signals: RecordedSignals = field(default_factory=RecordedSignals)


def plan_with_plain_defaults(run: Run, ranks: RankInfo) -> Plan:
    """Returns the plan of `run` with the plain defaults for what it leaves to the planner."""
    device: DeviceType = "cuda" if ranks.device.type == "cuda" else "cpu"
    bf16 = torch.cuda.is_bf16_supported() if device == "cuda" else None
    return Plan.from_run(run, world_size=ranks.world_size, device=device, bf16_hardware=bf16)


def prepare_job(
    stack: ExitStack,
    plan: Plan,
    *,
    ranks: RankInfo,
    where: PhaseTracker,
    memory_failure: OutOfMemoryReporter,
    resume: bool,
    started: float,
) -> TrainJob:
    """Builds, shards and restores what `plan` trains, opens its directory and log, and reports the start.

    stack: closes what was opened; memory_failure: gets what the rank trains, as soon as it is there
    started: when the command began, in seconds of the epoch
    """
    run = plan.run
    data, evaluations = _build_data_and_evaluations(run, where)  # before anything is allocated or written
    directory = open_directory_on_rank_zero(stack, plan, ranks=ranks, resume=resume)
    if directory.previous_attempt is not None and plan.world_size != ranks.world_size:
        plan = plan_with_plain_defaults(run, ranks)  # nodes have left or joined: same settings, current ranks
    memory_failure.directory, memory_failure.plan = directory.root, plan
    memory_failure.model = model = _build_checked_model(run, data)
    loss = choose_loss(run, model)
    weights = find_pretrained_directory(run)
    saved = directory.checkpoints if resume or directory.previous_attempt is not None else None
    left = _check_checkpoint_and_find_unusable_state(plan, model, saved=saved, must_resume=resume)
    if saved is None:
        discard_offloaded_files(plan)
    compiler = stack.enter_context(count_compilation())
    shard(model, plan, init=None if weights is None else "none")
    state = _seed_generators_and_make_state(stack, plan, model=model, data=data)
    state.phase, memory_failure.optimizer = where, state.optimizer
    read = restore_train_state(state, plan, weights=weights, saved=saved, must_resume=resume)
    peak = _find_peak(plan, ranks)
    log = stack.enter_context(_open_log(state, plan, ranks=ranks, peak=peak))
    say, record, flush = log.print_message, log.record_event, log.flush_to_disk
    saver = RunCheckpointSaver(directory.checkpoints, plan, say=say, record=record, flush=flush)
    first, where.clock = state.step + 1, stack.enter_context(run_own_clock())
    job = TrainJob(
        plan=plan,
        ranks=ranks,
        directory=directory,
        state=state,
        data=data,
        evaluations=evaluations,
        loss=loss,
        log=log,
        matmul_peak=peak,
        command_started=started,
        first_step=first,
        checkpoints=stack.enter_context(saver),
        profiler=_make_profiler(plan, directory, ranks=ranks, log=log, first_step=first),
        stragglers=StragglerWatch(where.clock, log=log, device=ranks.device),
        pace=measurement.Throughput(trained_tokens=0),
        skipped_before=state.skipped,
        compiler=compiler,
    )
    _report_start_and_set_next_row(job, left=left, read=read, resume=resume)
    return job


def _build_data_and_evaluations(
    run: Run, where: PhaseTracker
) -> tuple[TrainingData, tuple[RunEvaluation, ...]]:
    """Builds all data of `run`. Tokenizing may take hours, and so reports to the watchdog."""
    alive = partial(where.enter, RunPhase.LOADING)
    data = build_data(run, alive=alive)
    evaluations = build_evaluations(run, data, alive=alive)
    where.enter(RunPhase.STARTING)
    return data, evaluations


def first_loss_warning(job: TrainJob) -> str | None:
    run = job.plan.run
    has_base = run.adapter.rank or find_pretrained_directory(run) is not None
    if job.first_step > 1 or job.first_loss is None or run.train.loss is not None or not has_base:
        return None
    vocabulary = build.count_vocabulary_rows(job.state.model, run)
    return None if vocabulary is None else guessing_warning(job.first_loss, vocabulary=vocabulary)


def guessing_warning(first_loss: float, *, vocabulary: int) -> str | None:
    """Returns a warning if the first loss, in nats, of a model with trained weights is that of guessing."""
    guessing = math.log(vocabulary)
    if first_loss < _GUESSING * guessing:
        return None
    return (
        f"warning: the first loss, {first_loss:.4g}, is that of guessing among {vocabulary:,} tokens "
        f"({guessing:.4g}): the base model's weights are not loaded or not trained, or the tokenizer is "
        "another model's\n"
        '  try: model.weights = "require", and data.tokenizer = model.hf'
    )


def flops_per_token(plan: Plan, model: nn.Module) -> float | None:
    """Returns FLOPs per token: by formula for the reference decoder, else the plan's prediction, if any."""
    own = build.decoder_flops_per_token(model, plan.run)
    return own if own is not None or plan.prediction is None else plan.prediction.flops_per_token


def _find_peak(plan: Plan, ranks: RankInfo) -> measurement.MatmulPeak:
    """Returns the FLOP/s that MFU refers to. On calibrated CPU ranks it is the calibration's. Collective."""
    is_calibrated = plan.prediction is not None and plan.prediction.calibration != "none"
    known = detect_hardware("cpu") if plan.device == "cpu" and is_calibrated else None
    calibrated = known.chip.flops_per_second if known is not None and known.is_calibrated else None
    return find_matmul_peak(ranks.device, plan.precision.param, calibrated=calibrated)


def _build_checked_model(run: Run, data: TrainingData) -> nn.Module:
    model = build.build_model(run)
    warn_of_unexpected_adapter_targets(model, run.adapter)
    build.check_sequence_length(model, run)
    build.check_vocabulary(run, token_count=data.vocabulary, model=model)
    return model


def _check_checkpoint_and_find_unusable_state(
    plan: Plan, model: nn.Module, *, saved: Path | str | None, must_resume: bool
) -> SavedRunState | None:
    """Returns offloaded state that the run cannot use. Collective.

    Raises CheckpointError if the run cannot continue from its newest checkpoint. Nothing is allocated yet.
    """

    def check_newest_checkpoint() -> None:
        place = None if saved is None else location_of(saved)
        newest = None if place is None else next(iterate_complete_checkpoints(place), None)
        if newest is not None:
            check_can_continue(plan.run, model, manifest=newest[1])

    run_on_rank_zero(check_newest_checkpoint, doing=f"looking for a checkpoint in {saved}")
    return find_unusable_offloaded_state(plan, saved=saved, must_resume=must_resume)


def find_unusable_offloaded_state(
    plan: Plan, *, saved: Path | str | None, must_resume: bool
) -> SavedRunState | None:
    """Returns offloaded state that a resuming run cannot use; None if all of it can be used. Collective.

    State is unusable if the offload target or the number of ranks has changed.

    saved: location of the checkpoints; None for a new run

    Raises CheckpointError if the run must resume, and there is no checkpoint but only unusable state.
    """
    if saved is None:
        return None

    def find_on_rank_zero() -> SavedRunState | None:
        found = find_saved_run_state(rank_offload_directory(plan, rank=0).parent)
        if found is None or _unusable_reason(plan, found) is None:
            return None
        ranks = count_text(found.world_size, "rank")
        if must_resume and newest_complete_step(saved) is None:
            raise CheckpointError(
                f"there is no checkpoint in {saved}, and {found.directory} cannot be used here.",
                got=_offloaded_state_text(found),
                why=f"it is of {ranks} with an nvme tier, and {_unusable_reason(plan, found)}",
                fix=f"--resume on {ranks} with an nvme tier; the files stay",
            )
        return found

    return run_on_rank_zero(find_on_rank_zero, doing="looking for state on the drive")


def unusable_offloaded_state_message(plan: Plan, found: SavedRunState, *, step: int) -> str | None:
    """Returns why `found` is not used and the run resumes after `step`; None if `found` is not newer."""
    if found.step <= step:
        return None
    on = f"resumes from the checkpoint of step {step}" if step else "starts again"
    why = _unusable_reason(plan, found)
    return (
        f"{found.directory} holds {_offloaded_state_text(found)}, which is not used, for {why}: the run {on}"
    )


def _unusable_reason(plan: Plan, found: SavedRunState) -> str | None:
    if not plan.run.offload.is_on_drive:
        return f'offload.tier is now "{plan.run.offload.tier}"'
    if found.world_size != plan.world_size:
        return f"there are now {count_text(plan.world_size, 'rank')}"
    return None


def _offloaded_state_text(found: SavedRunState) -> str:
    return f"step {found.step} of {count_text(found.world_size, 'rank')} ({format_bytes(found.taken_bytes)})"


def _seed_generators_and_make_state(
    stack: ExitStack, plan: Plan, *, model: nn.Module, data: TrainingData
) -> TrainState:
    seed_generators(plan)  # replaced by a checkpoint's own states
    prefetcher = MicrobatchPrefetcher(data, steps=plan.run.data.prefetch_steps)
    return TrainState(
        model,
        build_optimizer(model, plan),
        data=stack.enter_context(prefetcher),
        saved="trained" if plan.run.adapter.saves_only_adapters else "all",
        ema=plan.run.ema.decay > 0,
    )


def _open_log(
    state: TrainState, plan: Plan, *, ranks: RankInfo, peak: measurement.MatmulPeak
) -> AbstractContextManager[RunLog]:
    flops, size, at_peak = flops_per_token(plan, state.model), ranks.world_size, None
    if flops:
        at_peak = measurement.peak_tokens_per_second(peak, flops_per_token=flops, world_size=size)
    return open_run_log(
        plan.run,
        rank=ranks.rank,
        world_size=size,
        after_step=state.step,
        peak_tokens_per_second=at_peak,
    )


def _make_profiler(
    plan: Plan, directory: RunDirectory, *, ranks: RankInfo, log: RunLog, first_step: int
) -> StepProfiler:
    return StepProfiler(
        plan.run.log,
        directory.root,
        ranks=ranks,
        attempt=run_on_rank_zero(lambda: log.attempt, doing="counting attempts"),
        first_step=first_step,
        last_step=plan.run.train.step_count,
        say=log.print_message,
    )


def _report_start_and_set_next_row(
    job: TrainJob, *, left: SavedRunState | None, read: str | None, resume: bool
) -> None:
    """Prints a summary of the run, and whether it resumes, and records both as events.

    left: offloaded state on the drive that the run cannot use
    read: message about the weights that were read
    """
    directory, log, step, steps = job.directory, job.log, job.state.step, job.plan.run.train.step_count
    if directory.previous_run:
        log.print_message(f"an earlier run in {directory.root} is kept as {directory.previous_run}")
    unused = unusable_offloaded_state_message(job.plan, left, step=step) if left is not None else None
    exports = describe_impossible_exports(job.plan.run, job.state.model) if job.ranks.rank == 0 else []
    groups = group_lines(job.state.model, job.plan.run.optimizer) + evaluation_lines(job.evaluations)
    for text in (unused, _start_summary_text(job), *groups, read, *exports):
        if text is not None:
            log.print_message(text)
    log.record_event("plan", details={"plan": job.plan.model_dump(mode="json")})
    if resume or directory.previous_attempt is not None:
        log.record_event("resume", step=step, details={"ranks": job.ranks.world_size})
    if (attempt := directory.previous_attempt) is not None:
        log.print_message(attempt.resume_message(job.ranks.world_size, step=step, steps=steps))
    elif resume:
        log.print_message(f"resumed at step {step} of {steps}")
    for line in set_next_row_and_describe_changes(job.state, job.plan):
        log.print_message(line)


def _start_summary_text(job: TrainJob) -> str:
    plan, model = job.plan, job.state.model
    parameters = count_elements(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    replicas = f"{plan.replicate_degree} × " if plan.replicate_degree > 1 else ""
    accumulated = f" × {plan.accumulation} microbatches" if plan.accumulation > 1 else ""
    split = f" × {plan.tensor_parallel} (to a matmul)" if plan.tensor_parallel > 1 else ""
    of_them = f" ({format_count(trained)} trained)" if trained < parameters else ""
    scales = find_weight_scales(model)
    emulated = " (emulated: multiplied in fp32)" if plan.device == "cpu" else ""
    fp8_mode = f"{plan.run.precision.mode}{emulated}"
    in_fp8 = f"{fp8_mode}: {fp8_summary_text(scales.shares)}\n" if scales is not None else ""
    packed = f"{describe_packing(model)}\n" if plan.run.adapter.packed_format else ""
    return (
        f"{format_count(parameters)} parameters{of_them}, {plan.strategy} over "
        f"{replicas}{plan.shard_degree}{split} {plan.device} rank{'s' if plan.world_size > 1 else ''}, "
        f"{plan.precision.param} compute; "
        f"{plan.run.train.global_batch} × {plan.run.data.sequence_length} tokens a step{accumulated}\n"
        f"{in_fp8}{packed}{job.data.describe()}"
    )


def open_directory_on_rank_zero(
    stack: ExitStack, plan: Plan, *, ranks: RankInfo, resume: bool
) -> RunDirectory:
    """Opens the run's directory on rank 0, and returns it on all ranks. Records the start. Collective.

    Raises PlanError if the plan is for another number of ranks, unless this launch had an earlier attempt.
    """
    run = plan.run
    launch = LaunchId.merge_ranks(all_gather_object(LaunchId.from_environment()))
    if plan.world_size != ranks.world_size:
        record = Path(run.run.dir, LAUNCH)
        if run_on_rank_zero(lambda: launch.find_earlier_attempt(record), doing=f"reading {record}") is None:
            raise other_rank_count_error(plan.world_size, ranks.world_size)
    found: list[RunDirectory] = []
    if ranks.rank == 0:
        own = open_run_directory(
            Path(run.run.dir),
            resume=resume,
            launch=launch,
            saved_to=run.checkpoint.dir,
            kept=run.offload.is_on_drive,
            offload_path=run.offload.path,
        )
        found.append(stack.enter_context(own))
        record_attempt_start(found[0].root, run, ranks=ranks)
    return run_on_rank_zero(lambda: found[0], doing="opening the run's directory")
