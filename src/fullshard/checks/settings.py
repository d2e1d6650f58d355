"""Checks of settings that are each valid, and that together do something else than intended."""

from collections.abc import Iterator

from fullshard.checks.run_context import RunContext
from fullshard.errors import SpecError
from fullshard.spec.finding import Finding
from fullshard.spec.model_section import HuggingFaceModel
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.run import Run
from fullshard.training.schedule import learning_rate_factor, warmup_warning

_HIGH_RATE_FOR_WEIGHTS = 1e-3


def check_settings(context: RunContext) -> Finding:
    """Checks learning rate, saves, restarts and validation against the number of steps."""
    found = list(_iterate_problems(context.run))
    if found:
        return Finding.warning(
            "; ".join(problem for problem, _ in found),
            why="each setting is valid, and together they rarely are what is intended",
            fix="; ".join(fix for _, fix in found),
        )
    section = context.run.train
    return Finding.ok(f"{section.step_count} steps, warmup of {context.run.schedule.warmup_steps}")


def _iterate_problems(run: Run) -> Iterator[tuple[str, str]]:
    """Yields (problem, fix)."""
    steps, saves, schedule = run.train.step_count, run.checkpoint, run.schedule
    if (warmup := warmup_warning(run)) is not None:
        yield warmup, f"schedule.warmup_steps = {max(1, steps // 10)}"
    elif schedule.kind != "constant" and schedule.warmup_steps == steps > 1:
        yield "schedule.warmup_steps is train.steps: the rate never decays", "fewer schedule.warmup_steps"
    if steps > 1 and learning_rate_factor(schedule, step=steps - 1, steps=steps) == 0:
        yield "the learning rate is 0 in the last step, which trains nothing", "schedule.min_lr_ratio = 0.01"
    if run.run.restarts and not saves.every:
        yield "run.restarts without checkpoint.every: a restart begins at step 1", "checkpoint.every = 100"
    if run.fault_tolerance.on_spike == "rollback" and not saves.every:
        yield 'fault_tolerance.on_spike = "rollback" without checkpoints to return to', "checkpoint.every"
    if saves.every > steps:
        yield f"checkpoint.every = {saves.every} is more than train.steps = {steps}", "a smaller one"
    if saves.keep_every and (not saves.every or saves.keep_every % saves.every):
        yield (
            f"checkpoint.keep_every = {saves.keep_every} is no multiple of checkpoint.every = {saves.every}",
            "a multiple of it, since only steps that are saved are kept",
        )
    validates = run.train.validate_every not in (0, type(run.train)().validate_every)
    if validates and run.train.validate_every > steps:
        every = run.train.validate_every
        yield f"train.validate_every = {every} is more than train.steps = {steps}", "a smaller one"
    if _has_weights(run) and run.optimizer.learning_rate > _HIGH_RATE_FOR_WEIGHTS and not run.adapter.rank:
        rate = run.optimizer.learning_rate
        yield f"optimizer.learning_rate = {rate:g} for weights that are trained already", "2e-5"


def _has_weights(run: Run) -> bool:
    if not isinstance(run.model, HuggingFaceModel) or run.model.weights == "none":
        return False
    try:
        directory = locate_config_file(run.model.hf).parent
    except SpecError:
        return False
    return any(directory.glob("*.safetensors"))
