"""The work of each rank of `fullshard train`, from the Run to its Measurement."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # else imported later, with gc enabled
from torch import Tensor, nn

from fullshard.checkpoint import location_of
from fullshard.data.batches import TrainingData
from fullshard.data.build import build_data
from fullshard.data.prefetch import MicrobatchPrefetcher
from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.errors import INTERRUPTED_EXIT_CODE, TrainError
from fullshard.jobs.checkpoints import RunCheckpointSaver
from fullshard.jobs.leftovers import find_unusable_state, leftover_state_messages, unusable_state_message
from fullshard.jobs.peak_bytes import gather_highest_peak
from fullshard.jobs.profiles import profile_if_chosen
from fullshard.jobs.run_directory import RunDirectory
from fullshard.jobs.run_log import RunLog, open_run_log
from fullshard.jobs.run_start import open_directory_on_rank_zero
from fullshard.jobs.step_observer import NoObserver, StepObserver, observe_steps
from fullshard.models.build import build_model, decoder_flops_per_token
from fullshard.models.checks import check_sequence_length, check_vocabulary
from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import is_causal_lm
from fullshard.offload.generation_manifest import SavedRunState
from fullshard.offload.state import find_offloaded_state
from fullshard.profiler.clock import find_matmul_peak
from fullshard.profiler.memory import measure_peak_memory
from fullshard.profiler.trace import profile_step
from fullshard.quantities import format_count, format_seconds
from fullshard.sharding.compile import CompilerTally, count_compilation, find_compiled_forwards
from fullshard.sharding.fp8 import find_weight_scales
from fullshard.sharding.mesh import RankInfo, process_group
from fullshard.spec.fp8 import fp8_summary_text
from fullshard.spec.measurement import MatmulPeak, Measurement, PeakBytes, StepSeconds, Throughput
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run
from fullshard.spec.run_files import EXPORT, MEASUREMENT, PLAN
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.survival.watchdog import watch_for_hangs
from fullshard.system.files import write_file_atomically
from fullshard.system.signals import RecordedSignals, record_signals
from fullshard.training.evaluate import generate, validation_loss
from fullshard.training.loop import Step, train
from fullshard.training.loss import Loss, choose_loss, next_token_loss
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import (
    find_pretrained_directory,
    make_checkpoint_location,
    restore_train_state,
    roll_back,
)
from fullshard.training.shard import (
    close_offloaded_state,
    discard_offloaded_files,
    rank_offload_directory,
    shard,
)
from fullshard.training.state import TrainState
from fullshard.weights.export import export

SAMPLE_PROMPT = "def "
# The first step allocates memory that later steps reuse. The second shows the steady peak. The third warms up
# caches that the memory meter cooled, so steps are profiled from the fourth on.
_METERED, _PROFILED_FROM = 1, 3


@dataclass
class _TrainJob:
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
    observer: StepObserver | NoObserver
    pace: Throughput
    skipped_before: int
    compiler: CompilerTally
    reported_compilations: int = 0
    reported_compile_seconds: float = 0.0
    unrecorded_compile_seconds: float = 0.0  # of the step `unrecorded`
    first_loss: float | None = None
    last: Step | None = None
    unrecorded: Step | None = None  # the last step, until its figures are read
    validation: float | None = None
    peak_bytes: PeakBytes | None = None
    profiled: list[StepSeconds] = field(default_factory=list[StepSeconds])
    slowed: set[int] = field(default_factory=set[int])  # steps that measuring slows down
    startup_seconds: float | None = None
    sample: str | None = None
    repeated_steps: int = 0
    signals: RecordedSignals = field(default_factory=RecordedSignals)


def run_job(
    run: Run, *, resume: bool, plan: Plan | None, command_started: float, predicted_step: str | None = None
) -> None:
    """Trains `run` on this rank, and writes checkpoints, metrics.jsonl and measurement.json into `run.dir`.

    predicted_step: spans of the plan's predicted step, to be written beside the measured ones
    After SIGTERM or SIGINT, ends within two steps, saves, and exits with INTERRUPTED_EXIT_CODE.
    """
    with ExitStack() as stack:
        timeout_seconds = run.fault_tolerance.process_group_timeout_seconds
        ranks = stack.enter_context(process_group(run.run.device, timeout_seconds=timeout_seconds))
        where = PhaseTracker()
        stack.enter_context(watch_for_hangs(where, run.fault_tolerance))
        plan = plan or _plan_without_prediction(run, ranks)
        job = _prepare_job(stack, plan, ranks=ranks, where=where, resume=resume, started=command_started)
        job.observer.write_predicted(predicted_step)
        # Signals are only noted until everything is saved, because ranks must agree on how to react.
        with record_signals(signal.SIGTERM, signal.SIGINT, raise_second_interrupt=True) as job.signals:
            interrupted = _train_steps(job)
            _save_and_report_end(job, interrupted=interrupted)
            close_offloaded_state(job.state.model, plan=job.plan, finished=not interrupted)
        if job.checkpoints.failed is not None:
            raise job.checkpoints.failed
    if interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)


def _plan_without_prediction(run: Run, ranks: RankInfo) -> Plan:
    device: DeviceType = "cuda" if ranks.device.type == "cuda" else "cpu"
    bf16 = torch.cuda.is_bf16_supported() if device == "cuda" else None
    return Plan.from_run(run, world_size=ranks.world_size, device=device, bf16_hardware=bf16)


def _prepare_job(
    stack: ExitStack, plan: Plan, *, ranks: RankInfo, where: PhaseTracker, resume: bool, started: float
) -> _TrainJob:
    run = plan.run
    # Before anything is allocated or written. Tokenizing may take hours, and so reports to the watchdog.
    data = build_data(run, alive=lambda: where.enter(RunPhase.LOADING))
    where.enter(RunPhase.STARTING)
    directory = open_directory_on_rank_zero(stack, plan, ranks=ranks, resume=resume)
    if directory.previous_attempt is not None and plan.world_size != ranks.world_size:
        plan = _plan_without_prediction(run, ranks)  # nodes have left or joined: same settings, current ranks
    model = build_model(run)
    check_sequence_length(model, run)
    check_vocabulary(run, tokens=data.vocabulary, model=model)
    loss = choose_loss(run, model)
    weights = find_pretrained_directory(run)
    saved = directory.checkpoints if resume or directory.previous_attempt is not None else None
    left = find_unusable_state(plan, saved=saved, must_resume=resume)
    if saved is None:
        discard_offloaded_files(plan)
    compiler = stack.enter_context(count_compilation())
    shard(model, plan, init=None if weights is None else "none")
    state = TrainState(
        model,
        build_optimizer(model, plan),
        data=stack.enter_context(MicrobatchPrefetcher(data, steps=run.data.prefetch_steps)),
        saved="trained" if run.adapter.saves_only_adapters else "all",
    )
    state.phase = where
    torch.manual_seed(run.run.seed + ranks.rank)  # for dropout; replaced by a checkpoint's own state
    read = restore_train_state(state, plan, weights=weights, saved=saved, must_resume=resume)
    peak = find_matmul_peak(ranks.device, plan.precision.param)
    flops = _flops_per_token(plan, model)
    rank, size, step = ranks.rank, ranks.world_size, state.step
    run_log = open_run_log(run, rank=rank, world_size=size, after_step=step, flops_per_token=flops, peak=peak)
    log = stack.enter_context(run_log)
    saver = RunCheckpointSaver(directory.checkpoints, plan, say=log.print_message, record=log.record_event)
    observed = observe_steps(
        model, where, log=log, directory=directory.root, every=run.log.trace_every, first_step=step + 1
    )
    job = _TrainJob(
        plan=plan,
        ranks=ranks,
        directory=directory,
        state=state,
        data=data,
        loss=loss,
        log=log,
        matmul_peak=peak,
        command_started=started,
        first_step=step + 1,
        checkpoints=stack.enter_context(saver),
        observer=stack.enter_context(observed),
        pace=Throughput(warmup_steps=run.train.untimed_warmup_steps),
        skipped_before=state.skipped,
        compiler=compiler,
    )
    _report_start(job, left=left, read=read, resume=resume)
    return job


def _report_start(job: _TrainJob, *, left: SavedRunState | None, read: str | None, resume: bool) -> None:
    """Prints a summary of the run, and whether it resumes, and records both as events.

    left: offloaded state on the drive that the run cannot use
    read: message about the weights that were read
    """
    directory, log, step, steps = job.directory, job.log, job.state.step, job.plan.run.train.step_count
    if directory.previous_run:
        log.print_message(f"an earlier run in {directory.root} is kept as {directory.previous_run}")
    unused = unusable_state_message(job.plan, left, step=step) if left is not None else None
    reported = left.directory if left and unused else None
    for line in leftover_state_messages(job.plan, aside=directory.previous_run, reported=reported):
        log.print_message(line)
    for text in (unused, _start_summary_text(job), read):
        if text is not None:
            log.print_message(text)
    log.record_event("plan", details={"plan": job.plan.model_dump(mode="json")})
    if resume or directory.previous_attempt is not None:
        log.record_event("resume", step=step, details={"ranks": job.ranks.world_size})
    if (attempt := directory.previous_attempt) is not None:
        log.print_message(attempt.resume_message(job.ranks.world_size, step=step, steps=steps))
    elif resume:
        log.print_message(f"resumed at step {step} of {steps}")


def _start_summary_text(job: _TrainJob) -> str:
    plan, model = job.plan, job.state.model
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    replicas = f"{plan.replicate_degree} × " if plan.replicate_degree > 1 else ""
    accumulated = f" × {plan.accumulation} microbatches" if plan.accumulation > 1 else ""
    split = f" × {plan.tensor_parallel} (to a matmul)" if plan.tensor_parallel > 1 else ""
    of_them = f" ({format_count(trained)} trained)" if trained < parameters else ""
    scales = find_weight_scales(model)
    emulated = " (emulated: multiplied in fp32)" if plan.device == "cpu" else ""
    fp8_mode = f"{plan.run.precision.mode}{emulated}"
    in_fp8 = f"{fp8_mode}: {fp8_summary_text(scales.shares)}\n" if scales is not None else ""
    return (
        f"{format_count(parameters)} parameters{of_them}, {plan.strategy} over "
        f"{replicas}{plan.shard_degree}{split} {plan.device} rank{'s' if plan.world_size > 1 else ''}, "
        f"{plan.precision.param} compute; "
        f"{plan.run.train.global_batch} × {plan.run.data.sequence_length} tokens a step{accumulated}\n"
        f"{in_fp8}{job.data.describe()}"
    )


def _train_steps(job: _TrainJob) -> bool:
    """Runs all steps. Returns True if a signal, or a failed save, ended training before the last step."""
    try:
        interrupted = _iterate_and_record_steps(job)
    except TrainError:
        with suppress(TrainError):  # its figures may be what failed
            _record_last_step(job)
        raise
    _record_last_step(job)
    return interrupted


def _iterate_and_record_steps(job: _TrainJob) -> bool:
    steps, state = _iterate_steps(job), job.state
    metered = min(job.first_step + _METERED, job.plan.run.train.step_count)
    profiled = _profiled_step_indices(job)
    section, root, say = job.plan.run.log, job.directory.root, job.log.print_message
    job.slowed = {metered, *profiled, *section.profile}
    while True:
        index = state.step + 1
        if index == metered:
            with measure_peak_memory(job.ranks.device, model=state.model, optimizer=state.optimizer) as peak:
                step = next(steps, None)
            job.peak_bytes = gather_highest_peak(peak, job.state.model, plan=job.plan)
        elif index in profiled:
            with profile_step(job.ranks.device) as traced:
                step = next(steps, None)
            assert traced.seconds is not None, "the block has ended"
            # Only the rank that waited least counts, because the other ranks waited for it.
            every = all_gather_object(traced.seconds)
            job.profiled.append(min(every, key=lambda seconds: seconds.exposed_collective_seconds))
        else:
            with profile_if_chosen(section, index, rank=job.ranks.rank, directory=root, say=say):
                step = next(steps, None)
        if step is None:
            return False
        if step.rollback and _try_roll_back(job, step):
            steps = _iterate_steps(job)
            continue
        _record_validate_and_save(job, step)
        if step.stopping and step.index < job.plan.run.train.step_count:
            return True


def _iterate_steps(job: _TrainJob) -> Iterator[Step]:
    return train(
        job.state,
        job.plan,
        loss=job.loss,
        should_stop=lambda: job.signals.first_signal is not None or job.checkpoints.failed is not None,
    )


def _try_roll_back(job: _TrainJob, step: Step) -> bool:
    """Rolls back to the newest checkpoint after a spike in `step`. Returns False without a checkpoint."""
    job.state.phase.enter(RunPhase.LOADING)
    met = f"step {step.index}: loss {step.loss:.4g}, gradient norm {step.grad_norm:.3g}"
    job.checkpoints.wait_for_saves()
    if not roll_back(job.state, make_checkpoint_location(job.directory.checkpoints, job.plan), plan=job.plan):
        job.log.print_message(f"{met}; left out, for there is no checkpoint yet to go back to")
        return False
    job.repeated_steps += step.index - 1 - job.state.step
    job.observer.forget_after(job.state.step)
    job.log.record_skip(step)
    figures = {"loss": step.loss, "grad_norm": step.grad_norm}
    job.log.record_event("rollback", step=step.index, details={"to_step": job.state.step, **figures})
    job.log.drop_steps_after(job.state.step)
    job.log.print_message(f"{met}; back to step {job.state.step}, and past the batches since")
    return True


def _profiled_step_indices(job: _TrainJob) -> range:
    """Returns the indices of the steps to profile; none, unless at least one more step follows them."""
    first = job.first_step + _PROFILED_FROM
    steps = range(first, first + job.plan.run.log.profile_steps)
    return steps if steps.stop <= job.plan.run.train.step_count else range(0)


def _record_validate_and_save(job: _TrainJob, step: Step) -> None:
    """Records the step before `step`, and validates and saves if due.

    Records `step` itself only if the host has its figures, or must wait for them here anyway.
    """
    job.observer.observe_step(step)
    _record_last_step(job)
    job.unrecorded_compile_seconds = _report_compilation(job, step)
    job.last = job.unrecorded = step
    train_section, last = job.plan.run.train, step.index == job.plan.run.train.step_count
    validate = last or (train_section.validate_every and step.index % train_section.validate_every == 0)
    if validate and job.data.validation_tokens and not step.stopping:
        job.validation = validation_loss(job.state.model, _iterate_validation_batches(job), loss=job.loss)
        if math.isfinite(job.validation) and job.validation < (job.state.best or (math.inf,))[0]:
            job.state.best = (job.validation, step.index)
        job.state.phase.enter(RunPhase.BETWEEN_STEPS)
    every = job.plan.run.checkpoint.every
    save = bool(every) and step.index % every == 0 and not last and not step.stopping
    if validate or save or step.result.is_read or job.startup_seconds is None:
        _record_last_step(job, validation_loss=job.validation if validate else None)
    job.checkpoints.report_finished_saves()
    if save:
        job.state.phase.enter(RunPhase.SAVING)
        job.checkpoints.save(job.state)
        job.state.phase.enter(RunPhase.BETWEEN_STEPS)


def _record_last_step(job: _TrainJob, *, validation_loss: float | None = None) -> None:
    """Records the last step, after waiting for it, unless it is recorded."""
    step, job.unrecorded = job.unrecorded, None
    if step is None:
        return
    if job.startup_seconds is None:
        job.first_loss = step.loss  # waits
        job.startup_seconds = time.time() - job.command_started
        job.log.print_message(f"first step {format_seconds(job.startup_seconds)} after the command")
    job.pace = job.pace.with_step(
        tokens=step.tokens,
        seconds=step.seconds,
        data_seconds=step.data_seconds,
        is_slowed=step.index in job.slowed,
    )
    peak_bytes = job.peak_bytes.total if job.peak_bytes and step.index <= job.first_step + 1 else None
    job.log.record_step(
        step,
        compile_seconds=job.unrecorded_compile_seconds or None,
        peak_bytes=peak_bytes,
        validation_loss=validation_loss,
    )


def _report_compilation(job: _TrainJob, step: Step) -> float:
    """Prints what the compiler did so far, if it compiled in this step. Returns its seconds in the step."""
    done, forwards = job.compiler.compilations, find_compiled_forwards(job.state.model)
    if forwards and done > job.reported_compilations:
        again = f"compiled again in step {step.index}; so far " if job.reported_compilations else "compiled "
        job.log.print_message(again + job.compiler.of_blocks(forwards).format_text())
        job.reported_compilations = done
    before, job.reported_compile_seconds = job.reported_compile_seconds, job.compiler.seconds
    return job.compiler.seconds - before


def _iterate_validation_batches(job: _TrainJob) -> Iterator[dict[str, Tensor]]:
    """Yields the validation batches. Reports each one to the watchdog, for which it is progress."""
    for batch in job.data.validation(rank=job.plan.data_rank(job.ranks.rank), plan=job.plan):
        job.state.phase.enter(RunPhase.VALIDATING)
        yield cut_sequences(batch, job.plan)


def _save_and_report_end(job: _TrainJob, *, interrupted: bool) -> None:
    if job.last is not None:
        job.state.phase.enter(RunPhase.SAVING)
        job.checkpoints.save_last(job.state)
    else:
        job.log.print_message(
            f"all {job.plan.run.train.step_count} steps are done already; nothing was trained"
        )
    job.state.phase.enter(RunPhase.FINISHING)
    job.observer.write_last()
    if interrupted:
        job.log.print_message(
            f"stopped by a signal after step {job.state.step}; the same command with --resume continues it"
        )
    elif job.last is not None:
        job.sample = _sample_text_or_none(job)
    if job.ranks.rank != 0:
        return
    job.directory.record_run_end(interrupted=interrupted)
    if job.last is not None:
        root = job.directory.root
        write_file_atomically(root / PLAN, job.plan.model_dump_json(indent=2) + "\n")
        _make_measurement(job).save(root / MEASUREMENT)
        if job.plan.run.checkpoint.export and job.checkpoints.last is not None and not interrupted:
            saved = location_of(job.checkpoints.last, key_file=job.plan.run.checkpoint.key_file)
            export(saved, root / EXPORT)
            job.log.print_message(f"exported {root / EXPORT}")
    _record_end(job, interrupted=interrupted)


def _record_end(job: _TrainJob, *, interrupted: bool) -> None:
    if interrupted:
        job.log.record_event("stop", step=job.state.step, details={"saved": True})
    else:
        loss = None if job.last is None else job.last.loss
        details = {"loss": loss, "validation_loss": job.validation}
        job.log.record_event("end", step=job.state.step, details=details)


def _sample_text_or_none(job: _TrainJob) -> str | None:
    """Returns a text that the model generates; None if no sample is asked for or possible. Collective."""
    model, count = job.state.model, job.plan.run.log.sample_tokens
    if not count:
        return None
    loss = getattr(job.loss, "func", job.loss)
    if loss is not next_token_loss and not (isinstance(model, DecoderModel) or is_causal_lm(model)):
        job.log.print_message("no sample: nothing says that the model continues a text")
        return None
    prompt = job.data.encode(SAMPLE_PROMPT)
    if not prompt:
        return None
    window, multiple = job.plan.run.data.sequence_length, job.plan.tensor_parallel
    tokens = generate(model, prompt, tokens=count, window=window, multiple=multiple)
    return job.data.decode(tokens)


def _flops_per_token(plan: Plan, model: nn.Module) -> float | None:
    """Returns FLOPs per token: by formula for the reference decoder, else the plan's prediction, if any."""
    own = decoder_flops_per_token(model, plan.run)
    return own if own is not None or plan.prediction is None else plan.prediction.flops_per_token


def _make_measurement(job: _TrainJob) -> Measurement:
    offloaded = find_offloaded_state(job.state.model)
    compiled = find_compiled_forwards(job.state.model)
    return Measurement(
        directory=str(job.directory.root),
        strategy=job.plan.strategy,
        world_size=job.plan.world_size,
        device=job.matmul_peak.device,
        offload=_offload_target_text(job.plan),
        drive=None if offloaded is None else offloaded.settings.traffic.median_step_bytes(),
        first_step=job.first_step,
        pace=job.pace,
        skipped_steps=job.state.skipped - job.skipped_before,
        repeated_steps=job.repeated_steps,
        first_loss=job.first_loss,
        last_loss=job.last.loss if job.last else None,
        validation_loss=job.validation,
        byte_entropy=job.data.byte_entropy,
        flops_per_token=_flops_per_token(job.plan, job.state.model),
        peak=job.matmul_peak,
        peak_bytes=job.peak_bytes,
        step_seconds=_profile_scaled_to_mean_step(job),
        startup_seconds=job.startup_seconds,
        compilation=job.compiler.of_blocks(compiled) if compiled else None,
        checkpoint=str(job.checkpoints.last) if job.checkpoints.last else None,
        sample=job.sample,
    )


def _profile_scaled_to_mean_step(job: _TrainJob) -> StepSeconds | None:
    """Returns the mean step time, split into parts in proportion to the fastest profiled step's parts."""
    seconds = job.pace.step_seconds
    if seconds is None or not job.profiled:
        return None
    return min(job.profiled, key=lambda step: step.total).scaled_to(seconds)


def _offload_target_text(plan: Plan) -> str | None:
    section = plan.run.offload
    place = f" in {rank_offload_directory(plan, rank=0).parent}" if section.is_on_drive else ""
    return f"{section.tier}{place}" if section.offloads_optimizer else None
