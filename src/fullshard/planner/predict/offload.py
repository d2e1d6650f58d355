"""Offloaded state and activations: their bytes on the host and its drive, and their seconds per step.

[Note: tiers]
P         trained parameters of the rank's own shards
c, m      bytes per parameter in the compute dtype, and in the master's
F         bytes of the rank's frozen shards, in their own dtype
S         bytes of master and moments: 3 m P, or (m + 4) P with `moments = "bf16"`; each group's parts start
          at a page boundary

device    optimizer:*    shards in the compute dtype (c P); masters are stored with the moments. A gradient
                         leaves in the dtype it was reduced in (a cast to c would round it). Gradients of at
                         most two units are in transit; a third waits.
          params+*       no shards. Each all-gather copies in the rank's shard, and frees it when sent.
host      *:cpu          S, gradients (4 P: fp32 sums), with params+ the parameters (c P and F), and updated
                         parameters on their way to the device (one segment of a group)
          *:nvme         gradients (they never go to the drive), that segment, three times the largest
                         group's S, and with params+ buffers for four units' shards and four frozen ones
drive     *:nvme         two generations of S (one is always complete after a crash), space beside them for
                         other run state, parameters (one generation, since S can rebuild them), and F

On the CPU the host is the device: the masters of *:cpu are the shards, gradients stay in place, and nothing
is in transit.

A step's update runs group by group, after the global norm is known (clipping is exact):

    read 3 m, update, write 3 m (and c with params+), copy c to the device

with read, update and copy overlapped. So it takes at least

    max((3 m read + 3 m written) / disk rate, P / adam rate, copies / host rate)

The drive's rate is that of reads and writes together. Groups are updated in forward order, so that the next
step's forward starts when its first unit is ready; each unit's first all-gather waits for its own update.
Reads run ahead of the update, see `slot_bytes_at_update_start`. With params+optimizer:nvme, each gather reads
from the drive any shard that is not in one of UNIT_BUFFERS, see [Note: units in memory] in
`gather_source.py`; an update drops what is in them. Frozen shards have as many buffers of their own; they
are written once before the first step and stay buffered from step to step.

With `update = "device"`, state and gradients (m per parameter) pass through two device buffers in pieces.
Copies in both directions overlap, and each piece is updated at the rate of the device's own update:

    read 3 m, copy 3 m and m in, update, copy 3 m out, write 3 m, copy c to the device

This takes device memory for two pieces of state and gradients, and the temporaries of stochastic rounding for
one. On GPUs `auto` selects the device if the longer copy direction (in) plus the update there takes less time
than the host's update: see `choose_update_device`.

[Note: activations on the host]
See [Note: moving activations] in `parallel.activation_offload`. Copies out are issued when a block's forward
ends; computing waits for them at the end of the next such block's forward. Copies back are issued when a
block's backward begins, for the block before, where computing waits for them. So a block's copies are free as
long as they fit beside the computing of one period of blocks:

    exposed = max(0, bytes / host rate - computing of one period)        each way, each block

They share the host link with the copies of an offload target, in order of issue.

Host memory holds the activations of one microbatch for all blocks except the last. Torch allocates pinned
memory in powers of two, so each storage is rounded up to one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from fullshard.errors import PlanError
from fullshard.planner.predict import unit_bytes
from fullshard.planner.predict.fsdp_time import TICKS, UnitCost, to_ticks
from fullshard.planner.predict.phases import memory_access_seconds
from fullshard.spec.groups import (
    UNIT_BUFFERS,
    OffloadGroup,
    ShardSizes,
    copy_chunk_elements,
    group_shards,
    page_aligned_bytes,
)
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import MicrobatchTrace, ModelSpec, TracePhase
from fullshard.spec.plan import ITEMSIZE, MergedUnitSettings, Plan
from fullshard.spec.prediction import ActivationOffloadTerms, OffloadTerms
from fullshard.spec.run import OffloadSection, Tier

TIERS: tuple[Tier, ...] = (
    "none",
    "optimizer:cpu",
    "params+optimizer:cpu",
    "optimizer:nvme",
    "params+optimizer:nvme",
)
_SLOTS = 3
_PAYLOAD = 16 << 20  # bytes allocated beside each generation
_SUM = 4  # bytes per gradient: gradients are summed in fp32
_ADAM_TOUCHES = 7  # reads value, gradient and two moments; writes all of these except the gradient


class OffloadSecondsPerByteOrParameter(NamedTuple):
    """Seconds per byte or parameter of an offload target's operations."""

    copy: float  # seconds per byte copied to or from the host
    disk: float  # seconds per byte read from or written to the drive
    adam: float  # seconds per parameter updated by the host
    on_device: float  # seconds per parameter updated in device memory


def offload_seconds_per_byte_or_parameter(plan: Plan, hardware: Hardware) -> OffloadSecondsPerByteOrParameter:
    """Returns the seconds per byte, or per parameter, of the plan's offload target.

    Raises PlanError if `hardware` lacks a rate.
    """
    section = plan.run.offload
    disk = _disk_seconds_per_byte(section, hardware)
    if hardware.device == "cpu":  # device memory is host memory: a copy reads and writes it
        whole = memory_access_seconds(2e8, hardware.rates.memory) / 1e8
        update = memory_access_seconds(_ADAM_TOUCHES * 4e8, hardware.rates.optimizer) / 1e8
        return OffloadSecondsPerByteOrParameter(whole, disk, update, update)
    on_device = memory_access_seconds(_ADAM_TOUCHES * 4e8, hardware.rates.optimizer) / 1e8
    rate = host_copy_bytes_per_second(hardware, f'offload.tier = "{section.tier}"')
    return OffloadSecondsPerByteOrParameter(1 / rate, disk, 1 / hardware.adam_per_second, on_device)


def host_copy_bytes_per_second(hardware: Hardware, needed_for: str) -> float:
    """Returns `hardware.host_bytes_per_second`. Raises PlanError, which names `needed_for`, if it is None."""
    if hardware.host_bytes_per_second is None:
        raise PlanError(
            f"{hardware.name}: how fast its host is is not known.",
            got=f"{needed_for}, no host_bytes_per_second",
            fix="fullshard calibrate there, or a hardware.toml with host_bytes_per_second",
        )
    return hardware.host_bytes_per_second


def choose_update_device(plan: Plan, hardware: Hardware) -> Literal["host", "device"]:
    """Returns the faster place for the offloaded update: see [Note: tiers]. The host if a rate is unknown."""
    section, copy = plan.run.offload, hardware.host_bytes_per_second
    if not section.offloads_optimizer or hardware.device == "cpu" or copy is None:
        return "host"
    rates, master = offload_seconds_per_byte_or_parameter(plan, hardware), ITEMSIZE[plan.precision.master]
    # State and gradients are copied in, which takes longer than copying the state back.
    there = rates.copy * (_state_bytes_per_element(plan, master) + master) + rates.on_device
    return "device" if there < rates.adam else "host"


def _disk_seconds_per_byte(section: OffloadSection, hardware: Hardware) -> float:
    """Returns the drive's seconds per byte; 0 if it is unknown and the target does not use a drive."""
    rate = hardware.disk_bytes_per_second
    if rate is not None:
        return 1 / rate
    if not section.is_on_drive:
        return 0.0
    raise PlanError(
        f"{hardware.name}: how fast its drive is is not known.",
        got=f'offload.tier = "{section.tier}", no disk_bytes_per_second',
        fix="fullshard calibrate --drive DIRECTORY there, or a hardware.toml with disk_bytes_per_second",
    )


def with_infinitely_fast_drive(hardware: Hardware) -> Hardware:
    """Returns `hardware` with an infinitely fast drive, for plans on a drive whose rate was not measured.

    The prediction then marks drive time as unknown: see `OffloadTerms.disk_seconds`.
    """
    return hardware.model_copy(update={"disk_bytes_per_second": math.inf})


def add_offload_costs(
    cost: UnitCost, size: unit_bytes.UnitBytes, *, plan: Plan, rates: OffloadSecondsPerByteOrParameter
) -> UnitCost:
    """Returns `cost` with the fields of the plan's offload target set. See [Note: tiers]."""
    section = plan.run.offload
    if not section.offloads_optimizer:
        return cost
    compute, master = ITEMSIZE[plan.precision.param], size.master_itemsize
    state = _state_bytes_per_element(plan, master)
    on_disk, shards = section.is_on_drive, section.offloads_parameters
    update = rates.adam * size.trained
    if section.update == "device":
        cost = replace(
            cost,
            update_in=to_ticks(rates.copy * (state + master) * size.trained),
            update=to_ticks(rates.on_device * size.trained),
            update_out=to_ticks(rates.copy * state * size.trained),
        )
    else:
        cost = replace(cost, update=to_ticks(update))
    if plan.device == "cpu" and not on_disk:
        return cost
    stays = not plan.copies_gradients_to_host
    read = state * size.trained
    written = read + (size.on_drive if shards else 0)
    return replace(
        cost,
        leave=0 if stays else to_ticks(rates.copy * size.reduce_output),
        add=0 if stays else to_ticks(update * 3 / _ADAM_TOUCHES),
        update_disk=to_ticks(rates.disk * (read + written)) if on_disk else 0,
        back=0 if shards else to_ticks(rates.copy * (size.trained * compute)),
        fetch_disk=to_ticks(rates.disk * size.on_drive) if on_disk and shards else 0,
        shards_on_disk=size.on_drive if on_disk and shards else 0,
        fetch_frozen=to_ticks(rates.disk * size.frozen_on_drive) if on_disk and shards else 0,
        frozen_on_disk=size.frozen_on_drive if on_disk and shards else 0,
        fetch=to_ticks(rates.copy * (size.own_shards + size.frozen)) if shards else 0,
    )


def host_norm_ticks(plan: Plan, trained: int, *, rates: OffloadSecondsPerByteOrParameter) -> int:
    """Returns the host's ticks to read `trained` gradients for their norm; 0 if they are not clipped."""
    return to_ticks(rates.adam * trained / _ADAM_TOUCHES) if plan.run.optimizer.clip_norm else 0


def count_gathers_per_step(
    plan: Plan, trace: MicrobatchTrace, *, costs: Sequence[UnitCost], counts: Sequence[int]
) -> tuple[int, ...]:
    """Returns how many times per step a rank loads its shard of each traced unit, summed over its repeats."""
    frees = plan.reshard_after_forward
    times = plan.accumulation if frees else 1
    begun = {(phase.event, phase.unit) for phase in trace.phases}
    found: list[int] = []
    for index, (cost, count) in enumerate(zip(costs, counts, strict=True)):
        again = frees and cost.reshards and cost.gathers_in_backward
        both = (("pre_forward", index) in begun) + (again and ("pre_backward", index) in begun)
        found.append(times * count * both if cost.has_parameters else 0)
    return tuple(found)


class HostBusyTicks(NamedTuple):
    """Busy ticks per step of each host stream."""

    disk: int  # drive reads and writes
    update: int  # updates, gradient sums and the norm
    in_: int  # copies to the device
    out: int  # copies from the device


def host_busy_ticks(
    costs: Iterable[tuple[UnitCost, int, int]], *, reductions: int, norm: int, disk: int
) -> HostBusyTicks:
    """Returns the busy ticks per step of each host stream.

    costs: for each unit, its costs, its count in the model, and its shard loads per step.
    reductions: gradient reductions per step. Replicated units sum theirs on the device, and copy once.
    norm, disk: ticks of the gradient norm on the host, and of drive reads before all-gathers.
    """
    update = into = out = 0
    for cost, count, gathers in costs:
        sums = 1 if cost.is_replicated else reductions
        disk += count * cost.update_disk
        update += count * (cost.update + (sums - 1) * cost.add)
        into += count * (cost.update_in + cost.back) + gathers * cost.fetch
        out += count * (cost.update_out + sums * cost.leave)
    return HostBusyTicks(max(0, disk), update + norm, into, out)


def least_shard_bytes_read(plan: Plan, units: Sequence[tuple[UnitCost, int, int]]) -> int:
    """Returns a lower bound on the bytes of shards that the drive reads per step.

    Each pass over the units starts with those that the previous pass left in memory. `units`: as `costs` in
    `host_busy_ticks`.
    """
    there = 2 * plan.accumulation * UNIT_BUFFERS  # units left in memory before a pass, over all passes
    read = 0
    for sizes in ([u[0].shards_on_disk for u in units], [u[0].frozen_on_disk for u in units]):
        whole = sum(gathers * size for size, (*_, gathers) in zip(sizes, units, strict=True))
        read += max(0, whole - there * max(sizes, default=0))
    return read


class SlotBytesAtUpdateStart(NamedTuple):
    """Bytes of offloaded state in the three slots when an update begins."""

    kept: int = 0  # kept since the last update, so not read again
    ahead: int = 0  # read while the last update was being written
    behind: int = 0  # of two groups, which may still be written when the next one has been read


def slot_bytes_at_update_start(plan: Plan, records: Sequence[int]) -> SlotBytesAtUpdateStart:
    """Returns the bytes in the slots. `records`: bytes of each group's state, in the order of updates."""
    section, places = plan.run.offload, range(len(records))
    if not section.is_on_drive or not records:
        return SlotBytesAtUpdateStart()
    first, last = set(places[:_SLOTS]), set(places[-_SLOTS:])
    kept, ahead = (sum(records[at] for at in own) for own in (first & last, first - last))
    return SlotBytesAtUpdateStart(kept, ahead, sum(records[: _SLOTS - 1]))


def device_update_buffer_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Returns the bytes of device memory for an update of offloaded state there; 0 if the host updates it."""
    section = plan.run.offload
    if not (section.offloads_optimizer and section.update == "device"):
        return 0
    groups = _groups_with_itemsize(spec, plan, rank=rank)
    if not groups:
        return 0
    largest = max(_state_bytes_per_element(plan, master) + master for _, master in groups)
    elements = copy_chunk_elements(group for group, _ in groups)
    rounds = plan.run.offload.moments != "fp32" or plan.precision.stochastic_rounding
    temporary = unit_bytes.stochastic_rounding_temporary_bytes(elements, plan) if rounds else 0
    return 2 * largest * elements + temporary


def state_bytes_of_each_group(spec: ModelSpec, plan: Plan) -> tuple[int, ...]:
    """Returns the bytes of each group's masters and moments on rank 0."""
    return tuple(
        page_aligned_bytes(group.numel_with_gaps, master)
        + 2 * page_aligned_bytes(group.numel_with_gaps, _moment_itemsize(plan, master))
        for group, master in _groups_with_itemsize(spec, plan, rank=0)
    )


def _groups_with_itemsize(spec: ModelSpec, plan: Plan, *, rank: int) -> tuple[tuple[OffloadGroup, int], ...]:
    """Returns the groups of `rank`, each with the bytes per element of its masters, cached on `spec`."""
    size = plan.run.offload.sub_group_parameters
    key = ("offload groups", plan.shard_degree, plan.precision, plan.run.precision, size, rank)
    found = spec.derived_value_cache.get(key)
    if found is None:
        held: list[ShardSizes] = []
        itemsizes: dict[str, int] = {}
        for unit in sorted(spec.units, key=lambda unit: unit.position):
            settings = MergedUnitSettings.for_unit(plan, unit.override, kept=unit.kept)
            degree, master = settings.shard_degree, settings.precision.master
            itemsizes[master] = ITEMSIZE[master]
            for index, parameter in enumerate(unit.parameters):
                if parameter.requires_grad and parameter.shape:
                    numel = unit_bytes.unpadded_shard_numel(parameter.shape, degree, rank=rank % degree)
                    most = unit_bytes.padded_numel(parameter.shape, degree) // degree
                    name = f"{unit.position}.{index}"
                    held.append(ShardSizes(name, numel=numel, max_numel=most, dtype=master))
        groups = group_shards(held, sub_group_parameters=size)
        found = spec.derived_value_cache[key] = tuple((one, itemsizes[one.dtype]) for one in groups)
    return cast("tuple[tuple[OffloadGroup, int], ...]", found)


def _moment_itemsize(plan: Plan, master: int) -> int:
    return 2 if plan.run.offload.moments == "bf16" else master


def _state_bytes_per_element(plan: Plan, master: int) -> int:
    """Returns the bytes per element of the master and both moments."""
    return master + 2 * _moment_itemsize(plan, master)


def predict_offload_terms(  # signature: from `StepTimePredictor.predict_offload`
    plan: Plan,
    units: Sequence[tuple[unit_bytes.UnitBytes, int]],
    *,
    records: Sequence[int],
    busy: HostBusyTicks,
    shards_read: int,
    hardware: Hardware,
) -> OffloadTerms:
    """Returns the predicted host and drive use of the plan's offload target.

    units: sizes of each unit, with its count in the model.
    records: bytes of each group's state.
    shards_read: bytes of shards read from the drive per step.
    """
    section = plan.run.offload
    compute = ITEMSIZE[plan.precision.param]
    trained = sum(size.trained * count for size, count in units)
    state, on_cpu = sum(records), plan.device == "cpu"
    each = [size for size, count in units for _ in range(count)] if section.offloads_parameters else []
    shards = sum(size.own_shards + size.frozen for size in each)
    on_drive, frozen = [size.on_drive for size in each], [size.frozen_on_drive for size in each]
    segment = min(section.sub_group_parameters, max((size.largest_trained for size, *_ in units), default=0))
    is_untimed = section.is_on_drive and hardware.disk_bytes_per_second == math.inf
    host, disk, read, written = 0, 0, 0, 0
    if not on_cpu:
        host = _SUM * trained + (0 if shards else segment * compute)
    if section.is_on_drive:
        host += min(_SLOTS, len(records)) * max(records, default=0)
        host += _host_unit_buffers_bytes(on_drive) + _host_unit_buffers_bytes(frozen)
        disk, written = 2 * (state + _PAYLOAD) + sum(on_drive) + sum(frozen), state + sum(on_drive)
        read = state - slot_bytes_at_update_start(plan, records).kept + shards_read
    else:
        host += state + (0 if on_cpu else shards) + (_SUM * trained if plan.run.ema.decay else 0)
    return OffloadTerms(
        host_bytes=host,
        disk_bytes=disk,
        disk_read_bytes=read,
        disk_written_bytes=written,
        disk_seconds=None if is_untimed else busy.disk / TICKS,
        update_seconds=busy.update / TICKS,
        copy_seconds=max(busy.in_, busy.out) / TICKS,
        host_capacity_bytes=section.host_bytes or (None if on_cpu else hardware.host_memory_bytes),
    )


def _host_unit_buffers_bytes(units: Sequence[int]) -> int:
    """Returns the bytes of the host's buffers for units: those for reading, and one for an update to fill.

    units: bytes of each unit on the drive
    """
    return (min(UNIT_BUFFERS, sum(size > 0 for size in units)) + 1) * max(units, default=0)


class ActivationIoTicks(NamedTuple):
    """Copies of activations that begin in a phase."""

    out: int  # ticks of copies to the host
    back: int  # ticks of copies from the host
    waits: bool  # the phase waits for the copies that began before it


def activation_copy_ticks(
    phases: Sequence[TracePhase], plan: Plan, *, hardware: Hardware
) -> tuple[ActivationIoTicks, ...]:
    """Returns the copies of each phase, or () without any. Raises PlanError if their rate is unknown."""
    if not has_activation_copies(phases):
        return ()
    each = host_copy_bytes_per_second(hardware, 'recompute.mode = "offload"')

    def copies_of_phase(phase: TracePhase) -> ActivationIoTicks:
        out, back = (sum(one.value_at(plan.microbatch) for one in lines) for lines in (phase.out, phase.back))
        return ActivationIoTicks(to_ticks(out / each), to_ticks(back / each), phase.waits)

    return tuple(map(copies_of_phase, phases))


def has_activation_copies(phases: Sequence[TracePhase]) -> bool:
    """Returns True if any of `phases` copies activations to or from the host."""
    return any(phase.out or phase.back for phase in phases)


def predict_activation_offload_terms(
    plan: Plan, phases: Sequence[TracePhase], *, runs_per_microbatch: Sequence[int], hardware: Hardware
) -> ActivationOffloadTerms:
    """Returns the host use of one rank's activations, of phases with these numbers of runs."""
    held = copied = 0
    for phase, times in zip(phases, runs_per_microbatch, strict=True):
        for line in phase.out:
            size = round(line.value_at(plan.microbatch))
            held += times * (1 << max(0, size - 1).bit_length())
            copied += times * size
    copied *= plan.accumulation
    rate = hardware.host_bytes_per_second
    return ActivationOffloadTerms(
        host_bytes=held,
        copied_bytes=copied,
        copy_seconds=2 * copied / rate if rate else 0.0,
        host_capacity_bytes=plan.run.offload.host_bytes or hardware.host_memory_bytes,
    )
