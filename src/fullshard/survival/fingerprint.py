"""Check that all ranks take the same step, by numbers that are summed in each step's one all-reduce.

A rank that skips a step, runs another block, or issues a different collective of the same shape, causes no
error by itself: the collectives sum numbers that do not belong together, and the run finishes with a wrong
model.

[Note: equal by sums] An all-reduce sums and cannot compare. But Σx = N·x and Σx² = N·x² hold together only if
all N numbers are x (their variance Σx²/N - (Σx/N)² is then 0). The numbers are cut to as many bits as keep
N·x² < 2^53, the range in which fp64 counts exactly.
"""

import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist

from fullshard.distributed.unit_order import UnitEvents
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.torch_private.groups import count_issued_collectives as issued_collectives
from fullshard.torch_private.groups import find_default_store

WIDTH = 8
"""Number of values that a StepFingerprint adds to a step's all-reduce: two for each field."""

# After a failed check, a rank publishes its fingerprint at once, unless it waits in another collective.
_ANSWER_SECONDS = 5.0
_DIFFERENCES = {
    "step": "the number of the step differs",
    "collectives": "the number of collectives within it differs",
    "settings": "its learning rates, batch, place in the data, or kind of loss (a mean or a sum) differs",
    "units": "they run different units",
}


@dataclass(frozen=True)
class StepFingerprint:
    """Facts about one rank's step, which must be equal on all ranks.

    step: number of the step, from 1
    collectives: number of collectives of the default group that the rank has issued in this step
    settings: checksum of the step's settings, see `step_settings_checksum`
    units: checksum of the units that the rank has gathered and reduced, in order, see `UnitEvents`
    """

    step: int
    collectives: int
    settings: int
    units: int

    def summable_numbers(self, world_size: int) -> list[float]:
        """Returns the `WIDTH` numbers to sum over ranks: each field and its square. [Note: equal by sums]"""
        modulus = 1 << ((53 - world_size.bit_length()) // 2)
        cut = [value % modulus for value in astuple(self)]
        return [float(number) for value in cut for number in (value, value * value)]


def step_settings_checksum(plan: Plan, *, learning_rates: Sequence[float], row: int, nominal: int) -> int:
    """Returns a checksum of a step's learning rates, batch, position in the data, and nominal count.

    nominal: see [Note: one denominator] in `fullshard.training.step`
    """
    numbers = (plan.microbatch, plan.accumulation, row, nominal)
    return zlib.crc32(struct.pack(f"<{len(learning_rates)}d4q", *learning_rates, *numbers))


def count_issued_collectives(device: torch.device) -> int:
    """Returns the number of collectives that this rank has issued on the default group, or 0 if unknown."""
    group = dist.group.WORLD
    return 0 if group is None else issued_collectives(group, device)


def check_same_fingerprints(
    own: StepFingerprint, totals: Sequence[float], *, world_size: int, events: UnitEvents
) -> None:
    """Raises TrainError, on all ranks, unless the fingerprints of all ranks are equal.

    own: this rank's fingerprint
    totals: sums of `StepFingerprint.summable_numbers` over all ranks
    events: the units of this rank

    The error names the ranks that differ. Ranks exchange their fingerprints through the store, because the
    collectives themselves may be out of order.
    """
    if [world_size * number for number in own.summable_numbers(world_size)] == list(totals):
        return
    reported, orders = _exchange_fingerprints(own, world_size, events=events)
    if len({(one.step, one.settings) for one in reported.values()}) == 1 and len(orders) > 1:
        raise unit_mismatch_error(reported, events=events, orders=orders)
    raise fingerprint_mismatch_error(reported, own=own, world_size=world_size)


def unit_mismatch_error(
    reported: Mapping[int, StepFingerprint], *, events: UnitEvents, orders: Mapping[int, "array[int]"]
) -> TrainError:
    """Returns the error for ranks that ran different units. `orders` are those of each checksum of units."""
    texts = dict(zip(orders, events.first_different_texts(list(orders.values())), strict=True))
    groups: dict[str, list[int]] = {}
    for rank, one in sorted(reported.items()):
        groups.setdefault(texts.get(one.units, "runs others"), []).append(rank)
    step = next(iter(reported.values())).step
    return TrainError(
        f"the ranks run different modules in step {step}, so weights and gradients of different units were "
        "mixed.",
        got="the first difference: "
        + "; ".join(f"{rank_list_text(ranks)}: {text}" for text, ranks in groups.items()),
        why="all ranks must gather and reduce the same units in the same order",
        fix="run the same modules on all ranks. If the model draws which ones to run, draw with a generator "
        "of the CPU that has one seed on all ranks, as fullshard train seeds it; for a module that only some "
        "batches need, add 0 * its output to the loss",
    )


def fingerprint_mismatch_error(
    reported: Mapping[int, StepFingerprint], *, own: StepFingerprint, world_size: int
) -> TrainError:
    """Returns the error for differing fingerprints. Ranks not in `reported` are in another collective."""
    names = [field.name for field in fields(StepFingerprint)]
    differing = [name for name in names if len({getattr(one, name) for one in reported.values()}) > 1]
    shown = differing or ["step", "collectives"]
    groups: dict[str, list[int]] = {}
    for rank in range(world_size):
        groups.setdefault(_fingerprint_text(reported.get(rank), shown), []).append(rank)
    smallest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    what = (
        "; ".join(_DIFFERENCES[name] for name in differing)
        or "the sums differ from the values that the ranks sent"
    )
    return TrainError(
        f"the ranks are not in the same step (step {own.step}): {what}.",
        got="; ".join(f"{rank_list_text(ranks)}: {text}" for text, ranks in smallest_first),
        why="a rank skipped or repeated one, so later collectives mixed different values",
        fix="look for collectives or steps in code that not every rank runs: `if rank == 0`, an exception "
        'that is swallowed, data of other lengths; fault_tolerance.fingerprint = "step" does not count '
        "collectives",
    )


def rank_list_text(ranks: Sequence[int]) -> str:
    """Returns a text that names the ranks: [0, 1, 2, 5] -> `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _fingerprint_text(one: StepFingerprint | None, names: Sequence[str]) -> str:
    if one is None:
        return "in another collective"
    values = {name: getattr(one, name) for name in names}
    return ", ".join(
        f"{v} collectives" if name == "collectives" else f"{name} {v}" for name, v in values.items()
    )


def _exchange_fingerprints(
    own: StepFingerprint, world_size: int, *, events: UnitEvents
) -> tuple[dict[int, StepFingerprint], dict[int, "array[int]"]]:
    """Publishes `own` and `events`, and returns those of all ranks that publish theirs in time.

    Returns the fingerprints by rank, and the units by their checksum.
    """
    store, reported, orders = find_default_store(), {dist.get_rank(): own}, {own.units: events.numbers}
    if store is None:
        return reported, orders
    store = dist.PrefixStore("fullshard/fingerprint", store)
    store.set(f"units {own.units}", events.numbers.tobytes().hex())
    store.set(str(dist.get_rank()), ",".join(str(number) for number in astuple(own)))
    keys = [str(rank) for rank in range(world_size)]
    with suppress(RuntimeError):  # not all publish theirs in time; those that did are read below
        store.wait(keys, timedelta(seconds=_ANSWER_SECONDS))
    for rank, key in enumerate(keys):
        if rank not in reported and store.check([key]):
            reported[rank] = StepFingerprint(*(int(number) for number in store.get(key).decode().split(",")))
    for units in {one.units for one in reported.values()} - set(orders):
        orders[units] = array("q", bytes.fromhex(store.get(f"units {units}").decode()))
    return reported, dict(sorted(orders.items()))
