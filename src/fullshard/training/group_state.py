"""State that an optimizer keeps in its groups: a count of steps, or an estimated step size (Prodigy).

An entry of a group is state if its value differs from that at the start of training. All other entries are
settings, which a resumed run may change. Learning rates: `fullshard.training.learning_rates`.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from fullshard.errors import CheckpointError
from fullshard.training.learning_rates import RATE_KEYS

_Scalar = bool | int | float | str | None


def scalar_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, _Scalar]]:
    """Returns the scalar entries of each group, except learning rates. Waits for entries on a GPU."""
    return [_scalars_of(group) for group in optimizer.param_groups]


def _scalars_of(group: Mapping[str, Any]) -> dict[str, _Scalar]:
    entries = {key: one for key, one in group.items() if key != "params" and key not in RATE_KEYS}
    values = {
        key: one.item() if isinstance(one, Tensor) and one.numel() == 1 else one
        for key, one in entries.items()
    }
    return {key: one for key, one in values.items() if isinstance(one, _Scalar)}


def changed_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, initial: list[dict[str, _Scalar]]
) -> dict[str, JsonValue]:
    """Returns {name of a group's first parameter: entries that differ from `initial`}, to be saved."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, JsonValue] = {}
    for number, (group, now) in enumerate(
        zip(optimizer.param_groups, scalar_entries(optimizer), strict=True)
    ):
        before = initial[number] if number < len(initial) else {}
        changed = {key: one for key, one in now.items() if key not in before or before[key] != one}
        if changed and group["params"] and group["params"][0] in names:
            found[names[group["params"][0]]] = dict(changed)
    return found


def restore_entries(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    saved: Mapping[str, JsonValue],
    initial: list[dict[str, _Scalar]],
) -> None:
    """Restores what `changed_entries` returned. Other entries get their `initial` values again.

    Raises CheckpointError if one group would get the state of two.
    """
    for group, now, before in zip(optimizer.param_groups, scalar_entries(optimizer), initial, strict=False):
        for key in now.keys() & before.keys():
            if now[key] != before[key]:
                _set_entry(group, key, value=before[key])
    parameters = dict(model.named_parameters())
    restored: dict[int, dict[str, Any]] = {}
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
                _set_entry(group, key, value=value)


def _set_entry(group: dict[str, Any], key: str, *, value: _Scalar) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
