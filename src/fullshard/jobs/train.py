"""The work of each rank of `fullshard train`, from the Run to its Measurement and last save."""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from fullshard.distributed.agreement import largest_over_ranks
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import INTERRUPTED_EXIT_CODE, TrainError
from fullshard.jobs.evaluations import (
    RunEvaluation,
    evaluate_and_note_results,
    note_best_and_return_whether_new,
)
from fullshard.jobs.out_of_memory import OutOfMemoryReporter
from fullshard.jobs.run_start import (
    TrainJob,
    first_loss_warning,
    flops_per_token,
    plan_with_plain_defaults,
    prepare_job,
)
from fullshard.observe.memory import (
    PeakMemory,
    measure_peak_memory,
    read_memory_and_reset_peaks,
    storage_bytes_of_tensors,
)
from fullshard.offload.state import find_offloaded_state, offloaded_host_bytes
from fullshard.parallel.compile import find_compiled_forwards
from fullshard.parallel.mesh import process_group
from fullshard.quantities import format_seconds
from fullshard.spec.plan import Plan
from fullshard.spec.records.measurement import Measurement, PeakBytes, StepSeconds
from fullshard.spec.records.run_files import MEASUREMENT, PLAN
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.survival.watchdog import watch_for_hangs
from fullshard.system.files import write_file_atomically
from fullshard.system.process import record_signals
from fullshard.training.loop import Step, train
from fullshard.training.resume import roll_back
from fullshard.training.shard import close_offloaded_state, rank_offload_directory
from fullshard.training.state import TrainState

# The first step allocates memory that later steps reuse. The second shows the steady peak.
_METERED = 1


def run_job(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Trains `run` on this rank, and writes checkpoints, metrics.jsonl and measurement.json into `run.dir`.

    After SIGTERM or SIGINT, ends within two steps, saves, and exits with INTERRUPTED_EXIT_CODE.
    """
    with ExitStack() as stack:
        timeout_seconds = run.fault_tolerance.process_group_timeout_seconds
        ranks = stack.enter_context(process_group(run.run.device, timeout_seconds=timeout_seconds))
        where = PhaseTracker()
        stack.enter_context(watch_for_hangs(where, run.fault_tolerance))
        with OutOfMemoryReporter(ranks, where=where) as memory_failure:
            job = prepare_job(
                stack,
                plan or plan_with_plain_defaults(run, ranks),
                ranks=ranks,
                where=where,
                memory_failure=memory_failure,
                resume=resume,
                started=command_started,
            )
            # Signals are only noted until everything is saved, because ranks must agree on how to react.
            with record_signals(signal.SIGTERM, signal.SIGINT, raise_second_sigint=True) as job.signals:
                interrupted = _train_and_return_if_interrupted(job)
                save_and_report_end(job, interrupted=interrupted)
                close_offloaded_state(job.state.model, plan=job.plan, finished=not interrupted)
    if interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)


def _train_and_return_if_interrupted(job: TrainJob) -> bool:
    """Runs the steps. Returns True if a signal ended training before the last step."""
    try:
        interrupted = _run_steps_and_return_if_interrupted(job)
    except TrainError as error:
        with suppress(TrainError):  # its figures may be what failed
            _record_pending_step(job)
        if job.state.counts.skipped_in_a_row:
            raise _add_checkpoint_before_skips(error, job) from error
        raise
    _record_pending_step(job)
    return interrupted


def _add_checkpoint_before_skips(error: TrainError, job: TrainJob) -> TrainError:
    """Returns `error`, which ended a run in skipped steps, with the checkpoint that a restart begins with."""
    job.checkpoints.wait_for_saves()
    before = job.checkpoints.last or (f"step {job.first_step - 1}" if job.first_step > 1 else None)
    start = f"--resume starts at {before}, from before the skipped steps" if before else "nothing was saved"
    return TrainError(error.what, got=error.got, why=error.why, fix=f"{error.fix}; {start}")


def _run_steps_and_return_if_interrupted(job: TrainJob) -> bool:
    steps, state = _iterate_steps(job), job.state
    metered = min(job.first_step + _METERED, job.plan.run.train.step_count)
    job.slowed.add(metered)
    if job.first_step == 1:
        at_start = _evaluate(job, [one for one in job.evaluations if one.settings.at_start])
        job.log.record_results_before_first_step(at_start)
    while True:
        index = state.step + 1
        if index == metered:
            averages = state.average.device_tensors if state.average else ()
            with measure_peak_memory(
                job.ranks.device, model=state.model, optimizer=state.optimizer, averages=averages
            ) as peak:
                step = next(steps, None)
            job.peak_bytes = gather_highest_peak(peak, state, plan=job.plan)
        elif job.profiler.is_due(index):
            job.slowed.add(index)
            with job.profiler.profile_step_to_file(index):
                step = next(steps, None)
            _gather_profiled_step_seconds(job)
        else:
            step = next(steps, None)
        if step is None:
            return False
        if step.rollback and _try_roll_back(job, step):
            steps = _iterate_steps(job)
            continue
        _record_validate_and_save(job, step)
        if step.stopping and step.index < job.plan.run.train.step_count:
            return True


def _gather_profiled_step_seconds(job: TrainJob) -> None:
    """Notes the seconds of the profiled step on the rank that waited least. Collective."""
    own = job.profiler.last
    if own is not None:
        job.stragglers.note_device_seconds(own)
    seconds = StepSeconds() if own is None else own.terms()
    waited = math.inf if own is None else seconds.exposed_collective_seconds
    # Only the rank that waited least counts, because the other ranks waited for it.
    least, *terms = largest_over_ranks([-waited, *seconds.terms().values()])
    if least > -math.inf:
        job.profiled.append(StepSeconds(**dict(zip(seconds.terms(), terms, strict=True))))


def _iterate_steps(job: TrainJob) -> Iterator[Step]:
    return train(
        job.state,
        job.plan,
        loss=job.loss,
        should_stop=lambda: job.signals.first_signal is not None,
    )


def _try_roll_back(job: TrainJob, step: Step) -> bool:
    """Rolls back to the newest checkpoint after `step.rollback`. Returns False if no checkpoint exists."""
    job.state.phase.enter(RunPhase.LOADING)
    met = f"step {step.index}: loss {step.loss:.4g}, gradient norm {step.grad_norm:.3g}"
    job.checkpoints.wait_for_saves()
    if not roll_back(job.state, job.directory.checkpoints, plan=job.plan):
        job.log.print_message(f"{met}; left out, for there is no checkpoint yet to go back to")
        return False
    job.checkpoints.postponed = False  # that save was of the state that is gone
    job.repeated_steps += step.index - 1 - job.state.step
    job.stragglers.drop_window_steps()
    job.log.record_skip(step)
    figures = {"loss": step.loss, "grad_norm": step.grad_norm}
    job.log.record_event("rollback", step=step.index, details={"to_step": job.state.step, **figures})
    job.log.drop_steps_after(job.state.step)
    job.log.print_message(f"{met}; back to step {job.state.step}, and past the batches since")
    return True


def _record_validate_and_save(job: TrainJob, step: Step) -> None:
    """Records the step before `step`, and validates and saves if due.

    Records `step` itself only if the host has its figures, or must wait for them here anyway.
    """
    memory = read_memory_and_reset_peaks(job.ranks.device)
    job.stragglers.observe_step(step.index, memory=memory)
    _record_pending_step(job)
    job.unrecorded_memory = memory
    job.unrecorded_compile_seconds = _report_compilation_and_return_seconds(job, step)
    job.last = job.unrecorded = step
    last_step, best = job.plan.run.train.step_count, dict(job.state.best)
    last = step.index == last_step
    due = [one for one in job.evaluations if one.settings.is_due(step.index, last_step=last_step)]
    results = _evaluate(job, [] if step.stopping else due)
    is_new_best = note_best_and_return_whether_new(job.state, job.plan.run.best_result)
    every = job.plan.run.checkpoint.every
    is_save_due = (every and step.index % every == 0) or job.checkpoints.postponed or is_new_best
    save = bool(is_save_due) and not last and not step.stopping
    if results or save or step.result.is_read or job.startup_seconds is None:
        _record_pending_step(job, results=results)
    job.checkpoints.report_finished_saves()
    if save:
        job.state.phase.enter(RunPhase.SAVING)
        if not job.checkpoints.save(job.state):
            job.state.best = best  # the best one that was saved
        job.state.phase.enter(RunPhase.BETWEEN_STEPS)


def _evaluate(job: TrainJob, evaluations: Sequence[RunEvaluation]) -> dict[str, float]:
    """Returns the results of `evaluations`, and keeps them for the end of the run. Collective."""
    if not evaluations:
        return {}
    results = evaluate_and_note_results(evaluations, job.state, plan=job.plan, loss=job.loss)
    job.results |= results
    job.state.phase.enter(RunPhase.BETWEEN_STEPS)
    return results


def _record_pending_step(job: TrainJob, *, results: Mapping[str, float] | None = None) -> None:
    """Records the last step, after waiting for it, unless it is recorded.

    results: those of the evaluations after it
    """
    step, job.unrecorded = job.unrecorded, None
    if step is None:
        return
    if job.startup_seconds is None:
        job.first_loss = step.loss  # waits
        job.startup_seconds = time.time() - job.command_started
        job.log.print_message(f"first step {format_seconds(job.startup_seconds)} after the command")
        if (warning := first_loss_warning(job)) is not None:
            job.log.print_message(warning)
    job.pace = job.pace.with_step(
        tokens=step.tokens,
        trained_tokens=step.trained_tokens,
        seconds=step.seconds,
        data_seconds=step.data_seconds,
        is_slowed=step.index in job.slowed,
    )
    peak_bytes = job.peak_bytes.total if job.peak_bytes and step.index <= job.first_step + 1 else None
    job.log.record_step(
        step,
        compile_seconds=job.unrecorded_compile_seconds or None,
        peak_bytes=peak_bytes,
        results=results,
        memory=job.unrecorded_memory,
    )


def _report_compilation_and_return_seconds(job: TrainJob, step: Step) -> float:
    """Prints what the compiler did so far, if it compiled in this step. Returns its seconds in the step."""
    done, forwards = job.compiler.compilations, find_compiled_forwards(job.state.model)
    if forwards and done > job.reported_compilations:
        again = f"compiled again in step {step.index}; so far " if job.reported_compilations else "compiled "
        job.log.print_message(again + job.compiler.compilation_of_blocks(forwards).format_text())
        job.reported_compilations = done
    before, job.reported_compile_seconds = job.reported_compile_seconds, job.compiler.seconds
    return job.compiler.seconds - before


def gather_highest_peak(peak: PeakMemory, state: TrainState, *, plan: Plan) -> PeakBytes | None:
    """Returns, on all ranks, the peak memory by part of the rank whose peak is highest. Collective.

    peak: measured on this rank; without parts, the result is None
    """
    if peak.parts is None:
        return None
    offloaded, on_cuda = find_offloaded_state(state.model), plan.device == "cuda"
    masters, host = 0, None
    if offloaded is not None:
        # On the CPU, the meter counts fp32 masters as shards, and a plan counts them as host memory.
        masters = 0 if on_cuda else storage_bytes_of_tensors(offloaded.masters.values())
        gradients = sum(local_tensor(p).numel() * p.element_size() for p in offloaded.names_of)
        host = offloaded_host_bytes(offloaded) + (gradients if plan.copies_gradients_to_host else 0)
        host += state.average.host_bytes if state.average else 0
    parts = peak.parts.parts() | {"parameter_shards": peak.parts.parameter_shards - masters}
    own = PeakBytes(
        **parts,
        allocated=peak.bytes if on_cuda else None,
        reserved=peak.reserved_bytes if on_cuda else None,
        host=host,
    )
    names, numbers = zip(*own.model_dump(exclude_none=True).items(), strict=True)  # of the same on all ranks
    _, *fullest = largest_over_ranks([own.total, *numbers])
    most = {} if host is None else {"host": int(largest_over_ranks([host])[0])}
    return PeakBytes(**dict(zip(names, map(int, fullest), strict=True)) | most)


def save_and_report_end(job: TrainJob, *, interrupted: bool) -> None:
    """Saves the last checkpoint, and writes plan and measurement. Collective."""
    if job.last is not None:
        job.state.phase.enter(RunPhase.SAVING)
        job.checkpoints.save_last(job.state)
    else:
        job.log.print_message(
            f"all {job.plan.run.train.step_count} steps are done already; nothing was trained"
        )
    job.state.phase.enter(RunPhase.FINISHING)
    if interrupted:
        job.log.print_message(
            f"stopped by a signal after step {job.state.step}; the same command with --resume continues it"
        )
    if job.ranks.rank != 0:
        return
    job.directory.record_run_end(interrupted=interrupted)
    if job.last is not None:
        root = job.directory.root
        write_file_atomically(root / PLAN, job.plan.model_dump_json(indent=2) + "\n")
        _make_measurement(job).save(root / MEASUREMENT)
    if interrupted:
        job.log.record_event("stop", step=job.state.step, details={"saved": True})
    else:
        loss = None if job.last is None else job.last.loss
        details = {"loss": loss, "validation_loss": None, **job.results}
        job.log.record_event("end", step=job.state.step, details=details)


def _make_measurement(job: TrainJob) -> Measurement:
    offloaded = find_offloaded_state(job.state.model)
    compiled = find_compiled_forwards(job.state.model)
    section, seconds = job.plan.run.offload, job.pace.step_seconds
    place = f" in {rank_offload_directory(job.plan, rank=0).parent}" if section.is_on_drive else ""
    fastest = min(job.profiled, key=lambda step: step.total, default=None)
    return Measurement(
        directory=str(job.directory.root),
        strategy=job.plan.strategy,
        world_size=job.plan.world_size,
        device=job.matmul_peak.device,
        offload=f"{section.tier}{place}" if section.offloads_optimizer else None,
        drive=None if offloaded is None else offloaded.settings.traffic.median_step_bytes(),
        first_step=job.first_step,
        pace=job.pace,
        skipped_steps=job.state.skipped - job.skipped_before,
        repeated_steps=job.repeated_steps,
        first_loss=job.first_loss,
        last_loss=job.last.loss if job.last else None,
        validation_loss=job.results.get("validation_loss"),
        has_own_loss=job.plan.run.train.loss is not None,
        results=job.results,
        flops_per_token=flops_per_token(job.plan, job.state.model),
        peak=job.matmul_peak,
        peak_bytes=job.peak_bytes,
        step_seconds=None if fastest is None or seconds is None else fastest.scaled_to(seconds),
        startup_seconds=job.startup_seconds,
        compilation=job.compiler.compilation_of_blocks(compiled) if compiled else None,
        checkpoint=str(job.checkpoints.last) if job.checkpoints.last else None,
    )
