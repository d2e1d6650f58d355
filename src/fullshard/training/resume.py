"""Resuming a run from a checkpoint, starting it from weights, and rolling it back to a checkpoint.

[Note: place in the data] A state counts the rows of the data that its steps have taken or passed over, so a
run continues behind them with any global batch. A source of microbatches by step begins at multiples of the
global batch, unless it also has `microbatches_at_row`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue
from torch import nn

from fullshard.checkpoint import load
from fullshard.checkpoint.location import CheckpointLocation, newest_complete_step
from fullshard.checkpoint.manifest import MODEL_PREFIX, Manifest
from fullshard.distributed.agreement import run_on_rank_zero
from fullshard.errors import CheckpointError, TrainError
from fullshard.models.packed_weights import check_same_packing
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.schedule import learning_rate_factor
from fullshard.training.state import TrainedWith, TrainState
from fullshard.weights.files import find_weights_file, missing_weights_error
from fullshard.weights.low_bit import read_quantization
from fullshard.weights.pretrained import LoadReport, load_pretrained

MAX_ROLLBACKS = 3


def find_pretrained_directory(run: Run) -> Path | None:
    """Returns the directory of the pretrained weights of `run`, or None if its weights are initialised.

    Raises CheckpointError if there are none, although they are required, or there are other files of weights
    (adapters, shards without their index, pickles), or weights in a quantised format that is not read.
    """
    section = run.model
    if not isinstance(section, HuggingFaceModel) or section.weights == "none":
        return None
    config = locate_config_file(section.hf)
    found = find_weights_file(config.parent)
    kinds = ("adapter_*", "*.safetensors", "pytorch_model*.bin")
    if found is None and (section.weights == "require" or any(any(config.parent.glob(k)) for k in kinds)):
        raise missing_weights_error(config.parent)
    if found is not None:
        read_quantization(config)
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
        newest = run_on_rank_zero(lambda: newest_complete_step(saved), doing=doing) or 0

    def load_checkpoint_or_weights(*, missing_ok: bool) -> LoadReport | None:
        if saved is not None and load(state, saved, missing_ok=missing_ok):
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
    return None if read is None or read.missing_tensors_message else read.describe()


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


# The settings and the data of before #
# Sections whose settings change what is computed, without those that only change how.
_SECTIONS = (
    "run",
    "model",
    "adapter",
    "data",
    "train",
    "optimizer",
    "ema",
    "schedule",
    "precision",
    "communication",
)
_SAME_RESULTS = {
    "run": {"dir", "device", "ranks", "compile", "restarts"},
    "data": {"cache", "processes", "prefetch_steps", "trust_remote_code"},
    "train": {
        *("microbatch", "gradient_sync", "loss_chunk", "validate_every", "validate_sequences"),
        *("max_skipped_steps", "epochs"),
    },
}
# Settings of [data] that change labels, but not which row comes when.
_SAME_ROWS = {"data.document_mask", "data.train_on"}
_SETTINGS_OF_RATES = ("optimizer.learning_rate", "schedule.", "train.")
_LONGEST_TEXT = 60


def settings_that_affect_results(run: Run) -> dict[str, JsonValue]:
    """Returns the settings of `run` that change its results, by section."""
    return run.model_dump(mode="json", include=set(_SECTIONS), exclude=cast(Any, _SAME_RESULTS))


def changed_settings(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> dict[str, str]:
    """Returns {setting: "old -> new"} for settings in both that differ, unless one of them is `auto`."""
    found: dict[str, str] = {}
    for section in now.keys() & before.keys():
        old, new = before[section], now[section]
        if not isinstance(old, dict) or not isinstance(new, dict):
            continue
        for key in sorted(new.keys() & old.keys()):
            if old[key] != new[key] and "auto" not in (old[key], new[key]):
                found[f"{section}.{key}"] = f"{_short_text(old[key])} -> {_short_text(new[key])}"
    return dict(sorted(found.items()))


def check_can_continue(run: Run, model: nn.Module, *, manifest: Manifest) -> None:
    """Raises CheckpointError if `run`, whose `model` has no values yet, cannot continue from a checkpoint.

    It cannot if the format of packed weights is another, if shapes differ and settings of the model or
    adapter changed, or if `optimizer.name` did, unless a name has dots. The error names these settings.
    `load` compares all tensors later.
    """
    check_same_packing(model, manifest.values.get("packed_weights"))
    before = manifest.values_with_run.get("run")
    changed = changed_settings(before, settings_that_affect_results(run)) if isinstance(before, dict) else {}
    shapes = {f"{MODEL_PREFIX}{name}": tuple(one.shape) for name, one in model.named_parameters()}
    saved = {name: one.shape for name, one in manifest.tensors.items()}
    other = [name for name, shape in shapes.items() if saved.get(name, shape) != shape]
    decisive = {key: text for key, text in changed.items() if key.startswith(("model.", "adapter."))}
    if not (other and decisive):
        decisive = {key: text for key, text in changed.items() if key == "optimizer.name" and "." not in text}
    if decisive:
        raise CheckpointError(
            f"the run cannot continue from step {manifest.step}: its model or optimizer is another.",
            got=", ".join(f"{key} {text}" for key, text in decisive.items()),
            why=f"{other[0]} has another shape" if other else "each optimizer has a state of its own",
            fix="these settings as they were, or another run.dir to start over",
        )


def set_next_row_and_describe_changes(state: TrainState, plan: Plan) -> list[str]:
    """Sets the row of the data at which `state` continues under `plan`. Returns messages about changes.

    A message reports settings that differ from those the state was trained with before; another, what this
    means for the rows of the data. The next call has nothing to report. Collective.
    """
    before, batch = state.trained_with, plan.run.train.global_batch
    if before.source is not None and before.source[0] is plan and before.source[1] is state.data:
        return []
    # Rank 0's, since paths may differ between nodes, and a checkpoint has one value for all ranks.
    now = run_on_rank_zero(
        lambda: TrainedWith(
            run=settings_that_affect_results(plan.run),
            row_order=getattr(state.data, "row_order", None),
            validation_digest=getattr(state.data, "validation_digest", None),
        ),
        doing="comparing the settings with those of before",
    )
    changed = {} if before.run is None else changed_settings(before.run, cast(Any, now.run))
    messages: list[str] = []
    if changed:
        lines = [f"{key} {values}" for key, values in changed.items()]
        if any(key.startswith(_SETTINGS_OF_RATES) for key in changed):
            factor = learning_rate_factor(plan.run.schedule, step=state.step, steps=plan.run.train.step_count)
            rate = plan.run.optimizer.learning_rate * factor
            lines.append(f"so the settings give step {state.step + 1} the learning rate {rate:.3g}")
        messages.append("\n  ".join(["resumed with other settings:", *lines]))
    if "ema.validation" in changed:
        messages.append("validation losses were of other weights before, so the best one begins anew")
    if state.rows is None:
        state.rows = state.step * batch
        if state.step and before.is_loaded:
            messages.append(
                "the checkpoint does not record its train.global_batch: the data continues at row "
                f"{state.rows:,}, behind {state.step:,} batches of {batch}. If the batch was another, "
                "rows are skipped or come again"
            )
    if state.rows:
        messages += _align_rows_and_describe_changes(state, batch, changed=changed, now=now)
    state.trained_with = replace(now, source=(plan, state.data))
    return messages


def _align_rows_and_describe_changes(
    state: TrainState, batch: int, *, changed: Mapping[str, str], now: TrainedWith
) -> Iterator[str]:
    """Yields messages about rows that are skipped or come again. May move `state.rows`."""
    before, rows = state.trained_with, state.rows
    assert rows is not None, "it was set before"
    if not hasattr(state.data, "microbatches"):
        if before.is_loaded and state.iterator is None:
            yield f"the data is an iterable, which starts anew: what was seen in {rows:,} rows comes again"
        return
    moved = [key for key in changed if key == "run.seed" or key.startswith("data.")]
    moved = [key for key in moved if key not in _SAME_ROWS]
    known = now.row_order is not None and before.row_order is not None
    if known and now.validation_digest != before.validation_digest:
        yield "the validation data changed, so its losses cannot be compared with earlier ones"
    if now.row_order != before.row_order if known else moved:
        why = ", ".join(moved) or "the content of the data, or what made its tokens"
        yield (
            f"the rows of the data {'are' if known else 'may be'} in another order than before ({why}): "
            f"training continues at row {rows:,} of the new order: rows come again, others are left out"
        )
    rest = rows % batch
    if rest and not getattr(state.data, "takes_any_row", False):
        state.rows = rows + batch - rest
        yield (
            f"{batch - rest:,} rows of the data are skipped: its microbatches(step, ...) begins at multiples "
            f"of train.global_batch = {batch}, and {rows:,} rows were seen"
        )
    elif "train.global_batch" in changed:
        yield f"the data continues behind the {rows:,} rows of the steps before"


def _short_text(value: JsonValue) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
