"""A run that continues from a saved state: its settings against those of before, and its place in the data.

[Note: place in the data] A state counts the rows of the data that its steps have taken or passed over, so a
run continues behind them with any global batch. A source of microbatches by step begins at multiples of the
global batch, unless it also has `microbatches_at_row`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic import JsonValue
from torch import nn

from fullshard.checkpoint.manifest import MODEL_PREFIX, Manifest
from fullshard.distributed.agreement import run_on_rank_zero
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.state import TrainedWith, TrainState

# Sections whose settings change what is computed, without those that only change how.
_SECTIONS = ("run", "model", "adapter", "data", "train", "optimizer", "schedule", "precision")
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
_LONGEST_TEXT = 60


def result_settings(run: Run) -> dict[str, JsonValue]:
    """Returns the settings of `run` that change its results, by section."""
    left_out: Any = {name: keys for name, keys in _SAME_RESULTS.items()}
    return run.model_dump(mode="json", include=set(_SECTIONS), exclude=left_out)


def changed_settings(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> dict[str, str]:
    """Returns {setting: "old -> new"} for those in both that differ. A setting that is `auto` is open."""
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

    This names the settings that changed, before anything is allocated. `load` compares all tensors later.
    """
    before = manifest.state_values.get("run")
    changed = changed_settings(before, result_settings(run)) if isinstance(before, dict) else {}
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


def continue_run(state: TrainState, plan: Plan) -> list[str]:
    """Sets the row of the data at which `state` continues under `plan`. Returns messages about changes.

    A message reports settings that differ from those the state was trained with before; another, what this
    means for the rows of the data. The next call has nothing to report. Collective.
    """
    before, batch = state.trained_with, plan.run.train.global_batch
    if before.is_of(plan, state.data):
        return []
    # Rank 0's, since paths may differ between nodes, and a checkpoint has one value for all ranks.
    now = run_on_rank_zero(
        lambda: TrainedWith(result_settings(plan.run), getattr(state.data, "row_order", None)),
        doing="comparing the settings with those of before",
    )
    changed = {} if before.run is None else changed_settings(before.run, cast(Any, now.run))
    messages: list[str] = []
    if changed:
        named = ", ".join(f"{key} {values}" for key, values in changed.items())
        messages.append(f"resumed with other settings: {named}")
    if state.rows is None:
        state.rows = (state.step if before.batches is None else before.batches) * batch
        if before.batches:
            messages.append(
                "the checkpoint does not record its train.global_batch: the data continues at row "
                f"{state.rows:,}, behind {before.batches:,} batches of {batch}. If the batch was another, "
                "rows are skipped or come again"
            )
    if state.rows:
        messages += _row_messages(state, batch, changed=changed, order=now.row_order)
    state.trained_with = replace(now, source=(plan, state.data))
    return messages


def _row_messages(
    state: TrainState, batch: int, *, changed: Mapping[str, str], order: str | None
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
    known = order is not None and before.row_order is not None
    if order != before.row_order if known else moved:
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
