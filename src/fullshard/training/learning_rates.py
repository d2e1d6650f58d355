"""The learning rates of an optimizer's groups, which follow the run's schedule or the user's own.

[Note: whose rates]
Each group's own rate is multiplied by the factor of [schedule]. A group whose own rate is
`optimizer.learning_rate`, or this times a `lr_factor` of [[optimizer.groups]], follows this setting, also if
a later `train` has another. A group is left alone from the step on in which its rate is not the one that was
set here, because the loop sets it then, and so are all groups if a torch scheduler is attached to the
optimizer (`initial_lr` shows this).

Facts about a group are entries of the group itself, as those of torch's schedulers are, so they are in the
optimizer's `state_dict`. Checkpoints hold the rates that others set. The rates that are set here follow from
the optimizer, the settings and the step.

[Note: state in groups]
Optimizers keep state in their groups: a count of steps, or an estimated step size (Prodigy). Schedulers set
others (`betas`, OneCycleLR). An entry of a group is state if its value differs from that at the start of
training. All other entries are settings, which a resumed run may change.
"""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from fullshard.distributed.agreement import rank
from fullshard.errors import CheckpointError
from fullshard.quantities import count_text, join_names
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import OptimizerSection
from fullshard.training.schedule import learning_rate_factor

logger = logging.getLogger("fullshard")

_LAST = "fullshard_lr"  # the rate that was set here last; None if others set the rate
FACTOR = "fullshard_lr_factor"
"""Entry of a group whose own rate is `optimizer.learning_rate` times this factor."""
_BASE = "fullshard_base_lr"  # the group's own rate, unless it is `optimizer.learning_rate`
_NEXT = "fullshard_next_lr"  # rate of the next step by the schedule, and the group's own rate
_BUILT = "_fullshard_built"  # attribute of the optimizer
RATE_KEYS = frozenset({"lr", "initial_lr", _LAST, _BASE, _NEXT, FACTOR})
"""Entries of an optimizer's group that concern its learning rate."""
_KEYS = {"learning_rate": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}


def set_learning_rates(optimizer: torch.optim.Optimizer, run: Run, *, step: int) -> list[float]:
    """Sets the learning rates of step `step` (from 0), and returns those of all groups.

    See [Note: whose rates]. Groups without a rate (some optimizers choose it themselves) are left out. Logs
    rates that a scheduler or the loop has set, when they are first found.
    """
    steps = run.train.step_count
    factors = [learning_rate_factor(run.schedule, step=one, steps=steps) for one in (step, step + 1)]
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    has_scheduler = any("initial_lr" in group for group in groups)
    taken_over = list[str]()
    rates = [float(group["lr"]) for group in groups]  # all before any is set: groups may share a tensor
    for group, rate in zip(groups, rates, strict=True):
        if has_scheduler or group.get(_LAST, rate) != rate:
            if (last := group.get(_LAST, rate)) is not None:
                taken_over.append(f"{rate:.6g}" + (f" in place of {last:.6g}" if last != rate else ""))
            group[_LAST] = None
            continue
        base = run.optimizer.learning_rate * group.get(FACTOR, 1.0)
        if _LAST not in group and not math.isclose(rate, base, rel_tol=1e-6):
            group[_BASE] = rate
        own = group.get(_BASE, base)
        _set_group_entry(group, "lr", value=own * factors[0])
        group[_NEXT] = (own * factors[1], own)
        group[_LAST] = float(group["lr"])
    if taken_over and rank() == 0:
        logger.warning(
            "from step %d, a scheduler or the loop sets learning rates, which [schedule] then leaves alone: "
            "%s",
            step + 1,
            join_names(list(dict.fromkeys(taken_over))),
        )
    return [float(group["lr"]) for group in groups]


def mark_as_built_by_fullshard(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Marks an optimizer as one of this package, whose rates are those of the settings. Returns it."""
    setattr(optimizer, _BUILT, True)
    return optimizer


def is_built_by_fullshard(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, _BUILT, False)


def warn_that_schedule_multiplies_rates(optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Logs that [schedule] multiplies the rates of an optimizer that the user made.

    Logs nothing for a factor of always 1, with a torch scheduler, and after an earlier `train`.
    ReduceLROnPlateau leaves no trace in the optimizer until it first reduces a rate.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    is_known = is_built_by_fullshard(optimizer) or any({"initial_lr", _LAST} & one.keys() for one in groups)
    section = run.schedule
    if is_known or not groups or rank() != 0 or (section.kind == "constant" and not section.warmup_steps):
        return
    logger.warning(
        "[schedule] (%s, %s) multiplies the optimizer's learning rates (%s). A scheduler that "
        "acts later, as ReduceLROnPlateau does, starts from the products; for the optimizer's own rates: "
        'schedule.kind = "constant" and schedule.warmup_steps = 0',
        section.kind,
        count_text(int(section.warmup_steps), "warmup step"),
        join_names(list(dict.fromkeys(f"{float(group['lr']):.6g}" for group in groups))),
    )


def warn_of_unused_settings(optimizer: torch.optim.Optimizer, section: OptimizerSection) -> None:
    """Logs the settings that are neither defaults nor values of a group, for the optimizer ignores them."""
    unused = list[str]()
    for name, key in _KEYS.items():
        wanted = getattr(section, name)
        found = [_initial_value(one, key, wanted=wanted) for one in optimizer.param_groups if key in one]
        is_default = wanted == getattr(OptimizerSection(), name)
        if not is_default and not any(_is_same(wanted, value) for value in found):
            own = found[0] if found else f"no {key}"
            unused.append(f"optimizer.{name} = {wanted}, but {type(optimizer).__name__} has {own}")
    if unused and rank() == 0:
        logger.warning("settings without effect: %s", "; ".join(unused))


def rates_set_by_others(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, JsonValue]:
    """Returns {parameter name: [rate, a scheduler's initial rate or None]} where others set the rate."""
    found: dict[Tensor, JsonValue] = {}
    for group in optimizer.param_groups:
        initial = group.get("initial_lr")
        if initial is not None or group.get(_LAST, 0.0) is None:
            rates: list[JsonValue] = [float(group["lr"]), None if initial is None else float(initial)]
            found |= {parameter: rates for parameter in group["params"]}
    return {name: found[parameter] for name, parameter in model.named_parameters() if parameter in found}


def restore_rates_set_by_others(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, saved: Mapping[str, JsonValue]
) -> None:
    """Restores what `rates_set_by_others` returned, as torch's `load_state_dict` of an optimizer does.

    All other groups follow the schedule again. Logs a warning if rates change. Raises CheckpointError if the
    parameters of a group had several rates.
    """
    rates_of = {parameter: saved.get(name) for name, parameter in model.named_parameters()}
    is_changed = False
    for group in optimizer.param_groups:
        found = {str(rates_of[parameter]): rates_of[parameter] for parameter in group["params"]}
        if len(found) > 1:
            raise CheckpointError(
                "parameters of one group had several learning rates in the checkpoint.",
                got=", ".join(sorted(found)),
                why="the loop or a scheduler had set them, so they do not follow from the settings",
                fix="an optimizer with the groups of the run that wrote the checkpoint",
            )
        for rates in found.values():
            if rates is not None:
                rate, initial = cast(list[Any], rates)
                is_changed |= float(group["lr"]) != rate
                _set_group_entry(group, "lr", value=rate)
                group |= {_LAST: None} | ({} if initial is None else {"initial_lr": initial})
            elif group.get(_LAST, 0.0) is None:  # taken over after the step of the checkpoint
                group[_LAST] = float(group["lr"])
    if is_changed and rank() == 0:
        logger.warning(
            "the learning rates are those of the checkpoint, where a scheduler or the loop set them"
        )


def _initial_value(group: Mapping[str, Any], key: str, *, wanted: object) -> object:
    """Returns the value of `key` that `group` began with. `wanted` is that of a group that follows it."""
    if key != "lr":
        return group[key]
    follows = _LAST in group or FACTOR in group
    return group.get("initial_lr", group.get(_BASE, wanted if follows else group["lr"]))


def _is_same(wanted: object, found: object) -> bool:
    """Returns whether two values are equal. Tensors of rates are rounded to fp32."""
    if isinstance(wanted, float) and isinstance(found, float | Tensor):
        return math.isclose(wanted, float(found), rel_tol=1e-6)
    return wanted == found


# Other state in groups #
_Scalar = bool | int | float | str | None
_Plain = _Scalar | list[_Scalar]  # a list for a tuple (betas), as in JSON


def scalar_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, _Plain]]:
    """Returns the scalars and tuples of them in each group, except rates. Waits for entries on a GPU."""
    found: list[dict[str, _Plain]] = []
    for group in optimizer.param_groups:
        values: dict[str, list[Any]] = {
            key: [
                part.item() if isinstance(part, Tensor) and part.numel() == 1 else part
                for part in (one if isinstance(one, tuple) else [one])
            ]
            for key, one in group.items()
            if key != "params" and key not in RATE_KEYS
        }
        plain = {key: one for key, one in values.items() if all(isinstance(part, _Scalar) for part in one)}
        found.append({key: one if isinstance(group[key], tuple) else one[0] for key, one in plain.items()})
    return found


def describe_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[JsonValue] | None:
    """Returns the groups for exports, as torch's schedulers leave them after a step, with names as "params".

    `lr` is the rate of the next step. Values that are not finite are left out. None before the first step.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: list[JsonValue] = []
    for group, entries in zip(optimizer.param_groups, scalar_entries(optimizer), strict=True):
        if (rate := group.get("lr")) is not None:
            if _LAST not in group and "initial_lr" not in group:
                return None
            is_scheduled = group.get(_LAST) == float(rate) and _NEXT in group
            rates = group[_NEXT] if is_scheduled else (float(rate), float(group.get("initial_lr", rate)))
            entries |= {"lr": rates[0], "initial_lr": rates[1]}
        finite = {k: one for k, one in entries.items() if not isinstance(one, float) or math.isfinite(one)}
        found.append({**cast(Any, finite), "params": [names[one] for one in group["params"]]})
    return found


def changed_group_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, initial: list[dict[str, _Plain]]
) -> dict[str, JsonValue]:
    """Returns {name of a group's first parameter: entries that differ from `initial`}, to be saved."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, JsonValue] = {}
    for index, (group, now) in enumerate(zip(optimizer.param_groups, scalar_entries(optimizer), strict=True)):
        before = initial[index] if index < len(initial) else {}
        changed = {key: one for key, one in now.items() if key not in before or before[key] != one}
        if changed and group["params"] and group["params"][0] in names:
            found[names[group["params"][0]]] = cast(JsonValue, changed)
    return found


def restore_group_entries(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    saved: Mapping[str, JsonValue],
    initial: list[dict[str, _Plain]],
) -> None:
    """Restores what `changed_group_entries` returned. Other entries get their `initial` values again.

    Logs a warning if arguments of the optimizer change, which are not its own state. Raises CheckpointError
    if one group would get the state of two.
    """
    for group, now, before in zip(optimizer.param_groups, scalar_entries(optimizer), initial, strict=False):
        for key in now.keys() & before.keys():
            if now[key] != before[key]:
                _set_group_entry(group, key, value=before[key])
    parameters = dict(model.named_parameters())
    restored: dict[int, dict[str, Any]] = {}
    unrestored = scalar_entries(optimizer)
    for name, entries in saved.items():
        values = cast(dict[str, Any], entries)
        for number, group in enumerate(optimizer.param_groups):
            if not any(one is parameters.get(name) for one in group["params"]):
                continue
            if restored.setdefault(number, values) != values:
                raise CheckpointError(
                    "the optimizer's groups differ from those in the checkpoint.",
                    got=f"{values} and {restored[number]} for the parameters of one group",
                    why="groups keep state of the optimizer, which belongs to all of their parameters",
                    fix="an optimizer with the groups of the run that wrote the checkpoint",
                )
            for key, value in values.items():
                _set_group_entry(group, key, value=value)
    arguments = inspect.signature(type(optimizer)).parameters
    taken_over = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for old, new in zip(unrestored, scalar_entries(optimizer), strict=True)
        for key in arguments
        if old.get(key) != new.get(key)
    ]
    if taken_over and rank() == 0:
        logger.warning(
            "values of the optimizer are those of the checkpoint, where a scheduler or the loop set them: %s",
            join_names(list(dict.fromkeys(taken_over))),
        )


def _set_group_entry(group: dict[str, Any], key: str, *, value: _Plain) -> None:
    """Sets an entry of a group, in place if it is a tensor (compiled optimizers)."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value
