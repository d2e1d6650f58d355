"""State dicts of torch optimizers, as all formats of torch hold them: states, groups, schedules."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.quantities import join_names
from fullshard.takeover.source import MOMENTUM_SETTINGS, ForeignCheckpoint, ForeignGroup, LazyTensor

_SECOND = re.compile(r"(?:optim|optimizer|(?:pytorch_)?model(?:_fsdp)?)_[1-9]\d*(?=\.|$)")
Moments = dict[str, dict[str, LazyTensor]]


def split_steps(states: Mapping[str, Mapping[str, LazyTensor]]) -> tuple[Moments, float | None]:
    """Returns ({parameter: {key: tensor}} without counts of steps, the count of updates, if there is one).

    Raises CheckpointError if the counts differ, as in a mixture of two checkpoints.
    """
    read = {name: as_number(one["step"].read()) for name, one in states.items() if "step" in one}
    steps = {name: step for name, step in read.items() if step is not None}
    if len(set(steps.values())) > 1:
        first = {step: name for name, step in steps.items()}
        what = "the source mixes several steps."
        got = join_names([f"{step:g} of {name}" for step, name in first.items()], most=3)
        why = "files of several checkpoints, or parameters that some steps did not update"
        raise CheckpointError(what, got=got, why=why, fix="all files of one checkpoint")
    moments = {name: {k: v for k, v in one.items() if k != "step"} for name, one in states.items()}
    return {name: one for name, one in moments.items() if one}, next(iter(steps.values()), None)


def read_optimizer_dict(
    state_dict: Mapping[str, Any],
) -> tuple[Moments, float | None, tuple[ForeignGroup, ...], bool]:
    """Returns moments, the count of updates and groups of a state dict, and whether it has numbers.

    Its states are by name (of DCP's full state dicts), or by the number of the parameter, which an optimizer
    of `named_parameters()` has named.
    """
    raw = cast(Mapping[Any, Mapping[str, Any]], state_dict.get("state", {}))
    listed = cast(list[Mapping[str, Any]], state_dict.get("param_groups", []))
    names: dict[Any, str] = {}
    for one in listed:
        names |= zip(one.get("params", ()), one.get("param_names", ()), strict=False)
    moments, count = split_steps({str(names.get(key, key)): state_tensors(one) for key, one in raw.items()})
    groups = tuple(make_group([names.get(n, n) for n in one.get("params", ())], one) for one in listed)
    return moments, count, groups, any(isinstance(one, int) and one not in names for one in raw)


def state_tensors(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Returns the tensors in a dict, such as the state of a parameter. A `step` may be a number there."""
    tensors = {k: Tensor([v]).view(()) if k == "step" and as_number(v) else v for k, v in state.items()}
    return {
        key: one if isinstance(one, LazyTensor) else LazyTensor.from_tensor(one)
        for key, one in tensors.items()
        if isinstance(one, Tensor | LazyTensor)
    }


def make_group(names: Iterable[object], entry: Mapping[str, Any]) -> ForeignGroup:
    """Returns a group of `names` with the values of a torch group, which may be tensors.

    Raises CheckpointError for groups of Adam with weight decay in the gradient, and of RAdam and NAdam.
    """
    betas: Any = entry.get("betas")
    momentum = {key: as_number(entry.get(key)) for key in MOMENTUM_SETTINGS}
    decoupled = entry.get("decoupled_weight_decay")
    if decoupled is not None and ("amsgrad" not in entry or not decoupled and entry.get("weight_decay")):
        got = "weight decay in the gradient (Adam)" if "amsgrad" in entry else "RAdam or NAdam"
        why = "with the same moments, its steps are others"
        raise CheckpointError("the source's optimizer is not AdamW.", got=got, why=why, fix="weights alone")
    return ForeignGroup(
        tuple(map(str, names)),
        learning_rate=as_number(entry.get("lr")),
        peak_rate=as_number(entry.get("initial_lr")),
        weight_decay=as_number(entry.get("weight_decay")),
        betas=(float(betas[0]), float(betas[1])) if isinstance(betas, list | tuple) else None,
        eps=as_number(entry.get("eps")),
        momentum={key: one for key, one in momentum.items() if one is not None},
    )


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


def check_same_step(found: ForeignCheckpoint, step: float, *, where: str, may_skip: bool = False) -> None:
    """Raises CheckpointError unless the optimizer counted as many updates as the trainer counted steps.

    where: place of the trainer's count
    may_skip: whether there is a loss scale, with which steps may have been skipped
    """
    counted = step if found.update_count is None else found.update_count
    if counted != step and not (may_skip and counted < step):
        got = f"{where} is {step:g}, and the optimizer counted {counted:g} updates"
        raise CheckpointError("the source mixes several steps.", got=got, fix="all files of one checkpoint")


def as_lightning(found: ForeignCheckpoint, content: Any, *, file: Path) -> ForeignCheckpoint:
    """Returns the checkpoint with the facts that Lightning's `file` holds beside tensors."""
    step = content.get("global_step") if isinstance(content, dict) else None
    if not isinstance(step, int):
        raise DamagedCheckpointError(f"{file} is not a file of Lightning.", got=f"global_step = {step!r}")
    check_same_step(found, step, where=f"global_step of {file.name}")
    schedules: Any = content.get("lr_schedulers") or [{}]
    return replace(
        found,
        format="Lightning",
        files=tuple(dict.fromkeys((*found.files, file))),
        step=step,
        schedule_position=as_number(schedules[0].get("last_epoch")),
        version=str(content.get("pytorch-lightning_version")),
    )
