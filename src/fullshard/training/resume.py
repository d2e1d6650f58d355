"""Resuming a run from a checkpoint, starting it from weights, and rolling it back to a checkpoint."""

from pathlib import Path

from fullshard.checkpoint import NodeLocalDirectory, load
from fullshard.checkpoint.location import CheckpointLocation, location_of, newest_complete_step
from fullshard.distributed.agreement import run_on_rank_zero
from fullshard.errors import CheckpointError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import locate_config_file, read_config
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.state import TrainState
from fullshard.weights.files import find_weights_file
from fullshard.weights.pretrained import LoadReport, load_pretrained

MAX_ROLLBACKS = 3


def make_checkpoint_location(directory: str | Path, plan: Plan) -> CheckpointLocation:
    """Returns `directory` as a location of the plan's storage: shared, or each node's own disk."""
    location = location_of(directory)
    return NodeLocalDirectory(Path(directory)) if plan.run.checkpoint.storage == "per_node" else location


def newest_checkpoint_step(directory: str | Path, plan: Plan) -> int | None:
    """Returns the step of the newest complete checkpoint that this process sees, or None."""
    return newest_complete_step(make_checkpoint_location(directory, plan))


def find_pretrained_directory(run: Run) -> Path | None:
    """Returns the directory of the pretrained weights of `run`, or None if its weights are initialised.

    Raises CheckpointError if required weights are missing, SpecError if the weights are quantised.
    """
    section = run.model
    if not isinstance(section, HuggingFaceModel) or section.weights == "none":
        return None
    config = locate_config_file(section.hf)
    found = find_weights_file(config.parent)
    if found is None and section.weights == "require":
        raise CheckpointError(
            f"{section.setting_text} has no weights.",
            got=f"{config.parent}, without safetensors",
            why='model.weights = "require"',
            fix='model.weights = "none", which initialises, or the directory that has them',
        )
    packed = read_config(config).get("quantization_config")
    if found is not None and packed:
        method = packed.get("quant_method", "quantised") if isinstance(packed, dict) else "quantised"
        raise SpecError(
            f"{section.setting_text}: its weights are packed.",
            got=f"quantization_config: {method}",
            why="training needs fp32 or bf16, and quantized weights are not unpacked",
            fix='the model as it was before, or model.weights = "none"',
        )
    return None if found is None else config.parent


def restore_train_state(
    state: TrainState, plan: Plan, *, weights: Path | None, saved: str | Path | None, must_resume: bool
) -> str | None:
    """Loads `state` from the newest checkpoint in `saved`, or else from pretrained weights. Collective.

    weights: directory of the pretrained weights, or None
    saved: location of the checkpoints, or None for a new run
    must_resume: raise CheckpointError if there is nothing to resume from

    A source without the frozen parameters is loaded after one that has them: a checkpoint of adapters only
    after the weights, and the state on an offload drive after a checkpoint, or after the weights if there is
    no checkpoint. Returns a message about the weights that were read, or None.
    """
    newest, alone = 0, plan.run.adapter.saves_only_adapters
    if saved is not None:
        doing = f"looking for a checkpoint in {saved}"
        newest = run_on_rank_zero(lambda: newest_checkpoint_step(saved, plan), doing=doing) or 0

    def load_checkpoint_or_weights(*, missing_ok: bool) -> LoadReport | None:
        if saved is not None and load(state, make_checkpoint_location(saved, plan), missing_ok=missing_ok):
            return None
        return load_pretrained(state.model, weights, plan=plan) if weights is not None and not alone else None

    read = load_pretrained(state.model, weights, plan=plan) if weights is not None and alone else None
    # The offload drive's state is used unless a checkpoint is newer.
    outside = state.offloaded if saved is not None else None
    kept = outside is not None and outside.newest_restorable_step(at_least=newest) is not None
    is_frozen = not all(parameter.requires_grad for parameter in state.model.parameters())
    if not kept or (is_frozen and not alone):
        read = load_checkpoint_or_weights(missing_ok=kept or not must_resume) or read
    if kept and not state.restore_newest_generation(at_least=newest):
        read = load_checkpoint_or_weights(missing_ok=not must_resume) or read
    # A warning has already reported missing weights, including everything that this message would say.
    return None if read is None or read.missing else read.describe()


def roll_back(state: TrainState, directory: str | Path | CheckpointLocation, *, plan: Plan) -> bool:
    """Loads the newest complete checkpoint of `directory`, and moves the data position forward. Collective.

    Training then skips the batches since that checkpoint (as PaLM's authors did by hand, arXiv:2204.02311,
    section 5.1), unless the data is a plain iterable, which has no position. Returns False, with nothing
    changed, if there is no checkpoint yet.

    Raises TrainError after MAX_ROLLBACKS, CheckpointError if no checkpoint is complete.
    """
    if state.rollbacks >= MAX_ROLLBACKS:
        if state.offloaded:
            state.offloaded.withdraw_generation()
        raise TrainError(
            f"the run was rolled back {state.rollbacks} times, and spikes again at step {state.step}.",
            why="other batches did not help, so it is not the batches",
            fix="a lower optimizer.learning_rate, longer schedule.warmup_steps, an older checkpoint, or "
            'fault_tolerance.on_spike = "skip" if the curve is just rough',
        )
    batch = plan.run.train.global_batch
    next_row, rollbacks = state.step * batch if state.rows is None else state.rows, state.rollbacks
    if not load(state, directory, missing_ok=True):
        return False
    state.rollbacks = rollbacks + 1
    state.rows = next_row
    return True
