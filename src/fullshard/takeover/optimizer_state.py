"""State dicts of torch optimizers, as all formats of torch hold them: states, counts of steps, groups."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.errors import CheckpointError
from fullshard.quantities import join_names
from fullshard.takeover.source import ForeignCheckpoint, ForeignGroup, ForeignOptimizer, LazyTensor

_SECOND = re.compile(r"(?:optim|optimizer|(?:pytorch_)?model(?:_fsdp)?)_[1-9]\d*(?=\.|$)")
Moments = dict[str, dict[str, LazyTensor]]
LIGHTNING = "pytorch-lightning_version"
"""Key of Lightning's checkpoints."""
MOMENTUM_SETTINGS = ("momentum", "nesterov", "dampening")
"""Settings of SGD's and Muon's groups, as torch names them."""
# Entries of groups: numbers; those that are checked, or change no step; and those of other optimizers.
_NEWTON_SCHULZ = ("ns_steps", "ns_coefficients")
_SETTINGS = (
    *("lr", "initial_lr", "max_lr", "weight_decay", "betas", "eps"),
    *MOMENTUM_SETTINGS,
    *_NEWTON_SCHULZ,
)
_KNOWN = {
    *("step", "params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize"),
    *("amsgrad", "bias_correction", "correct_bias", "decoupled_weight_decay"),
}
_STATE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "row_var", "fp32"}
_OF_OTHER_OPTIMIZERS = {
    **{"momentum_decay": "NAdam", "wd_ratio": "AdamP", "amsbound": "AdaBound"},
    **dict.fromkeys(("grad_averaging", "max_coeff", "trust_clip"), "LAMB"),
}


def split_steps(states: Mapping[str, Mapping[str, LazyTensor]]) -> tuple[Moments, dict[str, float]]:
    """Returns ({parameter: {key: tensor}} without counts of steps, {parameter: its count of updates}).

    Raises CheckpointError for state of optimizers that fullshard does not have.
    """
    _check_keys(states.values())
    moments = {name: {k: v for k, v in one.items() if k != "step"} for name, one in states.items()}
    counts = {name: _read_count(one["step"].read()) for name, one in states.items() if "step" in one}
    return {name: one for name, one in moments.items() if one}, counts


def _check_keys(states: Iterable[Iterable[str]]) -> None:
    if others := set[str]().union(*states) - _STATE - {"step"}:
        raise other_optimizer_error([f"state {key}" for key in sorted(others)])


def read_optimizer_dict(state_dict: Mapping[str, Any]) -> ForeignOptimizer:
    """Returns the state in a state dict of torch's optimizers.

    Its states are by name (of DCP's full state dicts), or by the number of the parameter, which an optimizer
    of `named_parameters()` has named.
    """
    raw = cast(Mapping[Any, Mapping[str, Any]], state_dict.get("state", {}))
    listed = cast(list[Mapping[str, Any]], state_dict.get("param_groups", []))
    names: dict[Any, str] = {}
    for one in listed:
        names |= zip(one.get("params", ()), one.get("param_names", ()), strict=False)
    _check_keys(raw.values())  # also those without tensors, such as the dicts of bitsandbytes
    moments, updates = split_steps({str(names.get(key, key)): state_tensors(one) for key, one in raw.items()})
    groups = tuple(make_group([names.get(n, n) for n in one.get("params", ())], one) for one in listed)
    numbers = {one for group in listed for one in group.get("params", ()) if isinstance(one, int)}
    is_numbered = not numbers <= names.keys()
    return ForeignOptimizer(moments, updates, groups, has_numbered_moments=is_numbered)


def count_steps(updates: Mapping[str, float], reported: float | None, *, skipped: int = 0) -> int:
    """Returns the number of finished steps that the trainer `reported`, or the most updates of a parameter.

    Raises CheckpointError if neither is known, or if they differ by more than the `skipped` steps.
    """
    counted = max(updates.values(), default=None)
    if reported is None and counted is None:
        why = "its optimizer has no count, and there is no step or global_step"
        fix = 'a source with "model" and "step", such as a file of torch.save; step 0 takes the weights alone'
        raise CheckpointError("the source does not say how many steps it was trained.", why=why, fix=fix)
    if reported is not None and counted not in (None, reported - skipped):
        got = f"{reported:.0f} steps reported, {skipped} skipped; {counted:.0f} updates of the optimizer"
        raise CheckpointError("the source mixes several steps.", got=got, fix="all files of one checkpoint")
    return int(counted or 0) if reported is None else int(reported)


def count_steps_of_program(
    updates: Mapping[str, float], reported: float | None
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of updates, or else the step that a program `reported`, and notes for the report.

    Raises CheckpointError as `count_steps`, and for another step if the numbers of updates differ too.
    """
    step = count_steps(updates, reported if len(set(updates.values())) != 1 else None)
    if reported in (None, step):
        return step, ()
    return step, (f"the program's step {reported:.0f} is not taken: the optimizer counted {step} updates",)


def state_tensors(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Returns the tensors in a dict, such as the state of a parameter. A `step` may be a number there."""
    tensors = {key: one for key, one in state.items() if isinstance(one, Tensor | LazyTensor)}
    if "step" not in tensors and state.get("step") is not None:
        tensors["step"] = torch.tensor(_read_count(state["step"]))
    return {k: LazyTensor.from_tensor(v) if isinstance(v, Tensor) else v for k, v in tensors.items()}


def _read_count(value: Any) -> float:
    if (number := as_number(value)) is None:
        raise CheckpointError("a count of updates is not a number.", got=f"a {type(value).__name__}")
    return number


def make_group(names: Iterable[object], entry: Mapping[str, Any]) -> ForeignGroup:
    """Returns a group of `names` with the values of a torch group, which may be tensors.

    Raises CheckpointError as `check_optimizer`.
    """
    check_optimizer(entry)
    settings: dict[str, tuple[Any, ...]] = {}
    for key in _SETTINGS:
        value: Any = entry.get(key)
        numbers = [as_number(one) for one in (value if isinstance(value, list | tuple) else [value])]
        settings[key] = () if None in numbers else tuple(numbers)
    if "adjust_lr_fn" in entry:
        settings["adjust_lr_fn"] = (str(entry["adjust_lr_fn"] or "original"),)  # torch's default
    others = {k: v for k, v in entry.items() if v is not None and k not in _KNOWN and not settings.get(k)}
    return ForeignGroup(tuple(map(str, names)), settings, others)


def check_optimizer(entry: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a group, or settings, of an optimizer that fullshard does not have.

    The moments of such an optimizer may be like AdamW's, and its updates differ.
    """
    found = [f"{key} of {name}" for key, name in _OF_OTHER_OPTIMIZERS.items() if key in entry]
    found += ["maximize = True"] if entry.get("maximize") else []
    found += [f"{key} = {entry[key]}" for key in ("bias_correction", "correct_bias") if not entry.get(key, 1)]
    decoupled = entry.get("decoupled_weight_decay", entry.get("adam_w_mode"))
    if "decoupled_weight_decay" in entry and "amsgrad" not in entry:
        found += ["a group of RAdam or NAdam"]
    elif entry.get("weight_decay") and decoupled in (False, 0):
        found += ["weight decay in the gradient (Adam)"]
    if found:
        raise other_optimizer_error(found)


def other_optimizer_error(found: Sequence[str]) -> CheckpointError:
    """Returns the error for an optimizer whose steps are not those of fullshard's, because of `found`."""
    got, fix = join_names(found, most=3), "the weights alone, in a file with step 0"
    what = "the source's optimizer updates otherwise than AdamW, Muon and SGD here."
    return CheckpointError(what, got=got, fix=fix)


def merge_equal_groups(groups: Iterable[ForeignGroup]) -> tuple[ForeignGroup, ...]:
    """Joins groups that differ in their names alone. torchtitan saves one per parameter."""
    merged: dict[ForeignGroup, tuple[str, ...]] = {}
    for group in groups:
        key = replace(group, names=())
        merged[key] = merged.get(key, ()) + group.names
    return tuple(replace(key, names=names) for key, names in merged.items())


def as_number(value: Any) -> float | None:
    """Returns a number, which may be in a tensor; None for any other value."""
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    return float(value) if is_number else None


def check_is_alone(names: Iterable[object]) -> None:
    """Raises CheckpointError for names of files or entries of a second model or optimizer."""
    if others := [str(name) for name in names if _SECOND.match(str(name))]:
        got, fix = join_names(others, most=3), "a checkpoint with one of each"
        raise CheckpointError("the source has several models or optimizers.", got=got, fix=fix)


def make_lightning(
    optimizer: ForeignOptimizer,
    weights: Mapping[str, LazyTensor],
    *,
    content: Any,
    files: tuple[Path, ...],
    notes: tuple[str, ...] = (),
) -> ForeignCheckpoint:
    """Returns a checkpoint of Lightning. `content`: the facts that it saves beside tensors."""
    step, version = count_steps(optimizer.updates, int(content["global_step"])), content.get(LIGHTNING)
    return ForeignCheckpoint(
        optimizer, weights, step, format="Lightning", files=files, version=str(version), notes=notes
    )
