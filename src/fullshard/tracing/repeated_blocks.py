"""Removal of repeated blocks from a model, so that tracing a few of them describes all.

Blocks repeat with a period: one block, or several if only some of them recompute or have the same attention.
Two periods are kept in front and two or more behind. The inner ones of these have the same neighbours as a
block in the middle, and can be compared with each other. Blocks before them that are different, such as the
first, dense ones of a mixture of experts, are all kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn

from fullshard.sharding.units import Unit
from fullshard.spec.model import RepeatedUnits
from fullshard.spec.plan import Plan

_LONGEST_PERIOD = 8  # blocks; models that alternate do so by 2 to 6
# Attributes that count blocks; otherwise equal blocks differ in them.
_COUNTS = ("idx", "index", "number", "layer_id", "block_id", "depth")


@dataclass(frozen=True)
class BlockTruncation:
    """Units removed from a model, and the remaining ones that represent them."""

    removed_units: frozenset[str] = frozenset()  # names of the removed units
    repeats: tuple[RepeatedUnits, ...] = ()  # the periods that represent them, as unit indices of the trace


def truncate_repeated_blocks(
    model: nn.Module, units: Sequence[Unit], *, blocks: Sequence[nn.Module], plan: Plan
) -> BlockTruncation:
    """Removes equal blocks from the ModuleLists that contain them, in place, without renaming the others.

    Equal blocks have the same classes, shapes, settings and overrides. The caller checks in the trace that
    they also do the same.
    """
    owner = {module: unit for unit in units for module in unit.modules}
    left_out: set[str] = set()
    templates: list[tuple[list[str], int]] = []
    for container in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        run = list(container.children())
        if len(run) < 2 or any(module not in set(blocks) for module in run):
            continue
        signatures = [_block_signature(block, at, owner=owner) for at, block in enumerate(run)]
        found = _find_first_and_period(signatures, plan)
        if found is None:
            continue
        first, period = found
        kept = first + 4 * period
        dropped = range(first + 2 * period, len(run) - 2 * period - (len(run) - kept) % period)
        if not dropped:
            continue
        inside = [_names_of_units_inside(run[at], units) for at in range(first + period, first + 2 * period)]
        templates.append(([name for some in inside for name in some], 1 + len(dropped) // period))
        keys = list(container._modules)  # pyright: ignore[reportPrivateUsage]
        for at in dropped:
            left_out.update(_names_of_units_inside(run[at], units))
            del container._modules[keys[at]]  # pyright: ignore[reportPrivateUsage]
    return BlockTruncation(frozenset(left_out), _repeats_as_ranges(templates, units=units, left_out=left_out))


def _repeats_as_ranges(
    templates: Sequence[tuple[list[str], int]], *, units: Sequence[Unit], left_out: set[str]
) -> tuple[RepeatedUnits, ...]:
    kept = [unit.name for unit in units if unit.name not in left_out]
    found: list[RepeatedUnits] = []
    for names, times in templates:
        indices = sorted(kept.index(name) for name in names)
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            return ()  # blocks share a unit, or run out of order: the caller sees that units are missing
        found.append(RepeatedUnits(first=indices[0], units=len(indices), times=times))
    return tuple(found)


def _names_of_units_inside(block: nn.Module, units: Sequence[Unit]) -> list[str]:
    inside = set(block.modules())
    return [unit.name for unit in units if all(module in inside for module in unit.modules)]


def _find_first_and_period(signatures: Sequence[Any], plan: Plan) -> tuple[int, int] | None:
    """Returns (first, period) with the fewest blocks to keep, or None if signatures do not repeat.

    From block `first` on, signatures repeat after `period` blocks. The last period may differ; and the first,
    if there is no block before it: behind different blocks, the end of a block's backward may differ.
    """
    step = plan.run.recompute.block_period
    periods = range(step, max(step, _LONGEST_PERIOD) + 1, step)
    choices = sorted(product(range(_LONGEST_PERIOD), periods), key=lambda one: (one[0] + 4 * one[1], one[0]))
    for first, period in choices:
        later = range(first or 2 * period, len(signatures) - period)
        if all(signatures[at] == signatures[first + period + (at - first) % period] for at in later):
            return first, period
    return None


def _block_signature(block: nn.Module, at: int, *, owner: dict[nn.Module, Unit]) -> Any:
    """Returns everything that distinguishes one block from another, except its position and its values."""
    modules: list[Any] = []
    for name, module in block.named_modules():
        own = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        ]
        settings = [one for one in vars(module).items() if isinstance(one[1], (bool, int, float, str))]
        plain = sorted((key, value) for key, value in settings if not _is_index_attribute(key, value, at=at))
        unit = owner.get(module)
        override = None if unit is None else (unit.override, unit.keep_until_backward, unit.is_block)
        modules.append((name, type(module), own, plain, override))
    return modules


def _is_index_attribute(key: str, value: object, *, at: int) -> bool:
    is_own_layer = key == "layer" and isinstance(value, int) and value == at
    return is_own_layer or key == "training" or key.endswith(_COUNTS)
