"""Checks that all ranks take the same step, and that replicas hold the same bits.

A rank that skips a step, runs another block, or issues a different collective of the same shape, causes no
error by itself: the collectives sum numbers that do not belong together, and the run finishes with a wrong
model.

[Note: equal by sums] An all-reduce sums and cannot compare. But Σx = N·x and Σx² = N·x² hold together only if
all N numbers are x (their variance Σx²/N - (Σx/N)² is then 0). The numbers are cut to as many bits as keep
N·x² < 2^53, the range in which fp64 counts exactly. They are part of each step's one all-reduce.

Replicas start equal and take the same updates, so they stay equal bit for bit. If they differ, one of them
computed, stored or received something wrong (arXiv:2407.21783, section 3.3.4, counts such faults).
"""

import hashlib
import json
import logging
import struct
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import all_gather_object, all_ranks_have, largest_over_ranks
from fullshard.distributed.tensors import local_tensor
from fullshard.distributed.unit_order import UnitEvents
from fullshard.errors import TrainError
from fullshard.quantities import SHOWN_AT_ENDS, count_text, leave_out_middle, rank_list_text
from fullshard.spec.plan import Plan
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.survival.store_rows import append_row, count_rows
from fullshard.torch_private.groups import find_default_store, has_backend

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


class Mismatch(NamedTuple):
    """The difference between the ranks' fingerprints.

    what: the fields that differ; None if only the units do
    got: ranks with their values
    """

    what: str | None
    got: str


def step_settings_checksum(plan: Plan, *, learning_rates: Sequence[float], row: int, nominal: int) -> int:
    """Returns a checksum of a step's learning rates, batch, position in the data, and nominal count.

    nominal: see [Note: one denominator] in `fullshard.training.step`
    """
    numbers = (plan.microbatch, plan.accumulation, row, nominal)
    return zlib.crc32(struct.pack(f"<{len(learning_rates)}d4q", *learning_rates, *numbers))


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
    store = find_default_store()
    assert store is not None, "the ranks of a process group have a store"
    # All ranks that received these sums meet under this name.
    sums = zlib.crc32(struct.pack(f"{len(totals)}d", *totals))
    store = dist.PrefixStore(f"fullshard/fingerprint/{sums}", store)
    mismatch = exchange_mismatch(own, store, rank=dist.get_rank(), world_size=world_size, events=events)
    raise mismatch_error(mismatch, step=own.step)


def exchange_mismatch(
    own: StepFingerprint,
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    events: UnitEvents,
    answer_seconds: float = _ANSWER_SECONDS,
) -> Mismatch:
    """Returns the mismatch of all ranks that publish their fingerprints in time.

    The first rank to come reads them and publishes the mismatch. The store may end with the process of any
    rank, so all stay until the last one has read it.
    """
    publish_fingerprint(own, store, rank=rank, events=events)
    try:
        if store.add("judges", 1) == 1:
            publish_mismatch(store, world_size=world_size, events=events, answer_seconds=answer_seconds)
        store.wait(["texts"], timedelta(seconds=2 * answer_seconds))
        count, what, got = json.loads(store.get("texts"))
    except RuntimeError:  # the rank that reads them, or the store, has ended
        text = _fingerprint_text(own, ["step", "collectives"])
        return Mismatch(
            "which ranks differ is not known",
            f"rank {rank}: {text}; the others' are not known: the rank that compares them has ended",
        )
    with suppress(RuntimeError):  # a rank has ended without reading them
        if store.add("readers", 1) == count:
            store.set("all have read", "")
        store.wait(["all have read"], timedelta(seconds=answer_seconds))
    return Mismatch(what, got)


def publish_fingerprint(own: StepFingerprint, store: dist.Store, *, rank: int, events: UnitEvents) -> None:
    """Publishes a rank's fingerprint, and its units unless another rank has published the same."""
    if store.add(f"writers of units {own.units}", 1) == 1:
        store.set(f"units {own.units}", zlib.compress(events.numbers).hex())
    append_row(store, f"{rank},{','.join(str(number) for number in astuple(own))}\n", key="reported")


def publish_mismatch(
    store: dist.Store, *, world_size: int, events: UnitEvents, answer_seconds: float
) -> None:
    """Publishes [count, *`find_mismatch`] of the ranks whose fingerprints are published in time."""
    deadline = time.monotonic() + answer_seconds
    while count_rows(store, "reported") < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    rows = ([int(number) for number in row.split(b",")] for row in store.get("reported").splitlines())
    reported = {number: StepFingerprint(*values) for number, *values in rows}
    units = dict.fromkeys(one.units for one in reported.values())
    orders = {
        one: array("q", zlib.decompress(bytes.fromhex(store.get(f"units {one}").decode())))
        for one in sorted([*units][: 2 * SHOWN_AT_ENDS])
    }
    mismatch = find_mismatch(reported, world_size=world_size, events=events, orders=orders)
    store.set("texts", json.dumps([len(reported), *mismatch]))


def find_mismatch(
    reported: Mapping[int, StepFingerprint],
    *,
    world_size: int,
    events: UnitEvents,
    orders: Mapping[int, "array[int]"],
) -> Mismatch:
    """Returns the mismatch of the fingerprints that were reported.

    reported: fingerprints by rank; the other ranks of `world_size` are in another collective
    orders: checksum -> `numbers` of the UnitEvents that have it
    """
    groups: dict[str, list[int]] = {}
    if len({(one.step, one.settings) for one in reported.values()}) == 1 and len(orders) > 1:
        texts = dict(zip(orders, events.first_differing_event_texts(list(orders.values())), strict=True))
        for rank, one in sorted(reported.items()):
            groups.setdefault(texts.get(one.units, "runs others"), []).append(rank)
        return Mismatch(None, _groups_text(groups))
    names = [field.name for field in fields(StepFingerprint)]
    differing = [name for name in names if len({getattr(one, name) for one in reported.values()}) > 1]
    for rank in range(world_size):
        text = _fingerprint_text(reported.get(rank), differing or ["step", "collectives"])
        groups.setdefault(text, []).append(rank)
    what = (
        "; ".join(_DIFFERENCES[name] for name in differing)
        or "the sums differ from the values that the ranks sent"
    )
    return Mismatch(what, _groups_text(dict(sorted(groups.items(), key=lambda group: len(group[1])))))


def mismatch_error(mismatch: Mismatch, *, step: int) -> TrainError:
    """Returns the error of a rank in `step`."""
    what, got = mismatch
    if what is None:
        return TrainError(
            f"the ranks run different modules in step {step}, so weights and gradients of different units "
            "were mixed.",
            got=f"the first difference: {got}",
            why="all ranks must gather and reduce the same units in the same order",
            fix="run the same modules on all ranks. If the model draws which ones to run, draw with a "
            "generator of the CPU that has one seed on all ranks, as fullshard train seeds it; for a module "
            "that only some batches need, add 0 * its output to the loss",
        )
    return TrainError(
        f"the ranks are not in the same step (step {step}): {what}.",
        got=got,
        why="a rank skipped or repeated one, so later collectives mixed different values",
        fix="look for collectives or steps in code that not every rank runs: `if rank == 0`, an exception "
        'that is swallowed, data of other lengths; fault_tolerance.fingerprint = "step" does not count '
        "collectives",
    )


def _groups_text(groups: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(leave_out_middle([f"{rank_list_text(one)}: {text}" for text, one in groups.items()]))


def _fingerprint_text(one: StepFingerprint | None, names: Sequence[str]) -> str:
    if one is None:
        return "in another collective"
    values = {name: getattr(one, name) for name in names}
    return ", ".join(count_text(v, k[:-1]) if k == "collectives" else f"{k} {v}" for k, v in values.items())


logger = logging.getLogger("fullshard")

# Elements summed at once; each takes 24 bytes of temporary memory.
_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class ReplicaCheck:
    """Compares replicas every `fault_tolerance.check_replicas_every` steps. Warns if shards have none."""

    def __init__(self, plan: Plan) -> None:
        self._world_size, self._every = plan.world_size, plan.run.fault_tolerance.check_replicas_every
        if self._every and plan.replicate_degree == 1 and plan.world_size > 1 and dist.get_rank() == 0:
            logger.warning(
                "fault_tolerance.check_replicas_every: %s holds every shard on one rank alone; "
                "only unsharded tensors can be compared",
                plan.strategy,
            )

    def compare_if_due(
        self, model: nn.Module, tensors: Callable[[], Mapping[str, Tensor]], *, step: int, where: PhaseTracker
    ) -> None:
        """Compares parameters and optimizer state over the ranks that replicate them, if due. Collective.

        tensors: returns the tensors of the training state, by their names in checkpoints
        step: number of finished steps

        If they differ, raises TrainError on all ranks, which names the first such tensor and the ranks.
        """
        if self._world_size == 1 or not self._every or step % self._every:
            return
        where.enter(RunPhase.REDUCE)
        own, differing = _checksums_by_group(model, tensors()), list[Any]()
        # A rank with an entry of its own would reduce in a group without the others, so entries come first.
        entries = _number_of([[*found] for found in own.values()])
        are_alike = all_ranks_have(largest_over_ranks([entries]) == [entries])
        for group, found in own.items() if are_alike else ():
            number = _number_of([*found.values()])
            ends = torch.tensor([number, -number], device="cpu" if has_backend("cpu", group) else "cuda")
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            if ends.sum():  # the largest number of the group's ranks is not the smallest
                differing.append(group)
        if not are_alike or not all_ranks_have(not differing):
            compared = differing if are_alike else own
            named = {tuple(dist.get_process_group_ranks(group)): own[group] for group in compared}
            if error := _replica_mismatch_error(step, all_gather_object(named)):
                raise error


def _number_of(value: object) -> int:
    """Returns a digest of `repr(value)` below 2^48, which fp64 counts exactly."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest())


@torch.no_grad()
def local_tensor_checksum(tensor: Tensor) -> Tensor:
    """Returns Σ (2i + 1) · word_i mod 2^64 over the words of this rank's part, as an int64 scalar tensor.

    The factors are odd, so a change of one word always changes the sum. They differ, so swapping two
    different words changes it too.
    """
    local = local_tensor(tensor.detach()).contiguous().reshape(-1)
    words = local.view(_WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        weights = torch.arange(2 * start + 1, 2 * (start + chunk.numel()) + 1, 2, device=local.device)
        total += (chunk * weights).sum()
    return total


def _checksums_by_group(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[Any, dict[str, int]]:
    """Returns checksums of replicated tensors, by the group whose ranks hold the same part, and by name."""
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    device = next(model.parameters()).device
    found: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in parameters and not name.startswith("optimizer."):
            continue  # buffers and random states are each rank's own
        for group in _replicating_process_groups(tensor):
            found.setdefault(group, {})[name] = local_tensor_checksum(tensor).to(device)
    return {
        group: dict(zip(sums, cast(list[int], torch.stack([*sums.values()]).tolist()), strict=True))
        for group, sums in found.items()
    }


def _replicating_process_groups(tensor: Tensor) -> list[Any]:
    """Returns the process groups whose ranks hold the same part of `tensor` as this rank, one per axis."""
    if not isinstance(tensor, DTensor):
        return [dist.group.WORLD]
    mesh = tensor.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    replicated = [axis for axis in axes if tensor.placements[axis].is_replicate()]
    if replicated and replicated == axes and mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return [mesh.get_group(axis) for axis in replicated]


def _replica_mismatch_error(
    step: int, found: Sequence[Mapping[tuple[int, ...], Mapping[str, int]]]
) -> TrainError | None:
    """Returns the error that names, for each group of replicas, the tensor and the ranks that differ, if any.

    found: the checksums of each rank, by the ranks of a group and by name
    """
    lines: list[str] = []
    for holders in sorted({holders for one in found for holders in one}):
        sums = {rank: found[rank].get(holders, {}) for rank in holders}
        names = [name for one in sums.values() for name in one]
        counts = {name: Counter(one.get(name) for one in sums.values()) for name in names}
        name = next((name for name, count in counts.items() if len(count) > 1), None)
        if name is None:
            continue
        (usual, votes), *others = counts[name].most_common()
        odd = [rank for rank in holders if sums[rank].get(name) != usual]
        if others[0][1] == votes:  # a tie
            lines.append(f"{rank_list_text(holders)} differ in {name}, none more than another")
        else:
            rest = [rank for rank in holders if rank not in odd]
            lines.append(f"{rank_list_text(odd)} differs from {rank_list_text(rest)}, first in {name}")
    if not lines:
        return None
    return TrainError(
        f"replicas are not the same after step {step}: {lines[0]}.",
        got="; ".join(lines),
        why="replicas take the same updates, so a device, its memory or a link has given wrong numbers, or "
        "code of the run changes parameters on some ranks only",
        fix="resume from a checkpoint before it, without the machine of that rank",
    )
