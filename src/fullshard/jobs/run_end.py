"""Work at the end of a run on its ranks: the last save, the sample, the export and the measurement."""

from fullshard.jobs.run_start import TrainJob, flops_per_token
from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import is_causal_lm
from fullshard.models.loss import next_token_loss
from fullshard.offload.state import find_offloaded_state
from fullshard.parallel.compile import find_compiled_forwards
from fullshard.spec.plan import Plan
from fullshard.spec.records.measurement import Measurement, StepSeconds
from fullshard.spec.records.run_files import MEASUREMENT, PLAN
from fullshard.survival.phase import RunPhase
from fullshard.system.files import write_file_atomically
from fullshard.training.between_steps import generate
from fullshard.training.shard import rank_offload_directory

SAMPLE_PROMPT = "def "


def save_and_report_end(job: TrainJob, *, interrupted: bool) -> None:
    """Saves the last checkpoint, and writes plan, measurement, sample and export. Collective."""
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
    elif job.last is not None:
        job.sample = _sample_text_or_none(job)
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
        details = {"loss": loss, "validation_loss": job.validation}
        job.log.record_event("end", step=job.state.step, details=details)


def _sample_text_or_none(job: TrainJob) -> str | None:
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


def _make_measurement(job: TrainJob) -> Measurement:
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
        flops_per_token=flops_per_token(job.plan, job.state.model),
        peak=job.matmul_peak,
        peak_bytes=job.peak_bytes,
        step_seconds=_profile_scaled_to_mean_step(job),
        startup_seconds=job.startup_seconds,
        compilation=job.compiler.of_blocks(compiled) if compiled else None,
        checkpoint=str(job.checkpoints.last) if job.checkpoints.last else None,
        sample=job.sample,
    )


def _profile_scaled_to_mean_step(job: TrainJob) -> StepSeconds | None:
    """Returns the mean step time, split into parts in proportion to the fastest profiled step's parts."""
    seconds = job.pace.step_seconds
    if seconds is None or not job.profiled:
        return None
    return min(job.profiled, key=lambda step: step.total).scaled_to(seconds)


def _offload_target_text(plan: Plan) -> str | None:
    section = plan.run.offload
    place = f" in {rank_offload_directory(plan, rank=0).parent}" if section.is_on_drive else ""
    return f"{section.tier}{place}" if section.offloads_optimizer else None
