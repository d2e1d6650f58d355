"""Tiers: what of a rank's bytes goes to the host or to its drive, and what a step then waits for.

[Note: tiers]
P: trained parameters of the own shards, c and m: bytes of one in the dtype computed in and in the master's.
F: bytes of the own shards that are frozen, in their own dtype.

device    optimizer:*    shards in the dtype computed in (c P): the master is where the moments are. A reduced
                         gradient leaves as it was reduced (a cast to c would round it); two units' are on
                         their way at once, and a third waits.
          params+*       no shards; of each all-gather the own shard, copied in, and freed when it is sent.
host      *:cpu          master and moments (S) and gradients (4 P: fp32 sums), parameters c P and F
                         (params+), and of updated parameters what is on its way to the device, a segment of
                         a group
          *:nvme         gradients (they never go to the drive), that segment, three of the largest group's
                         S, and with params+ three of the largest unit's shards, and of its frozen ones
drive     *:nvme         two generations (a crash leaves one whole) of S, room beside them for the rest of a
                         run's state, parameters (they can be made again from S: one generation), and F

S: 3 m P; with `moments = "bf16"` (m + 4) P; each group's parts begin at a page. On the CPU the host is the
device: masters of *:cpu are the shards, gradients stay where they are, and nothing is on its way.

The update of a step is group by group, after the global norm is known (clipping is exact):

    read 3 m, update, write 3 m (and c with params+), copy c to the device

with read, update and copy beside each other. So it takes at least

    max((3 m read + 3 m written) / disk rate, P / adam rate, copies / host rate)

where the drive's rate is that of reads and writes together. Groups are taken in the order of forward, so that
the next step's forward begins when its first unit is there; each unit's first all-gather waits for its own
update. Reads are ahead of it, see `slots_hold`. (Reversing the order each step saves reading three groups,
and costs that overlap, which is planned as if it were there.) With params+optimizer:nvme the first gather of
a unit finds in memory what its update has made; for others the drive reads what is in none of UNIT_BUFFERS,
see [Note: units in memory] in `offload.unit_buffers`. What is frozen has as many of its own, is written once
before the first step, and stays there from step to step.

With `update = "device"` state and gradients (m a parameter) pass through two buffers there, in pieces, beside
each other in both directions, changed in between at the rate of the device's own update:

    read 3 m, copy 3 m and m in, update, copy 3 m out, write 3 m, copy c to the device

It takes two pieces of state and gradients of the device's memory, and what rounding at random needs for one.
On GPUs `auto` is the device where the longer direction of the copies (in) and the update there, one after the
other, take less than the host's update: see `faster_update`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.roofline import memory_seconds
from fullshard.planner.unit_bytes import UnitBytes, padded_numel, shard_numel
from fullshard.planner.unit_costs import TICKS, UnitCost, ticks
from fullshard.spec.groups import UNIT_BUFFERS, Group, ShardSize, group_shards, part_bytes, piece_elements
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec, Trace
from fullshard.spec.plan import ITEMSIZE, Plan, check_tier
from fullshard.spec.prediction import OffloadTerms
from fullshard.spec.run import OffloadSection, Tier
from fullshard.spec.unit import UnitSettings

TIERS: tuple[Tier, ...] = (
    "none",
    "optimizer:cpu",
    "params+optimizer:cpu",
    "optimizer:nvme",
    "params+optimizer:nvme",
)
_SLOTS = 3
_PAYLOAD = 16 << 20  # allocated beside each generation
_SUM = 4  # gradients are summed in fp32
_ADAM_TOUCHES = 7  # value, gradient and two moments are read, all but the gradient written
_ROUNDING_TOUCHES = 86  # where values are rounded at random: see `step_time`
_ROUNDING_BYTES = 31  # an element of a piece, meanwhile: see `unit_bytes.update_temporaries`
_NO_COST = {
    "leave": 0,
    "add": 0,
    "update_disk": 0,
    "update_in": 0,
    "update": 0,
    "update_out": 0,
    "back": 0,
    "fetch_disk": 0,
    "fetch_frozen": 0,
    "fetch": 0,
}


class HostRates(NamedTuple):
    """Seconds of a byte to or from the host and the drive, and of a parameter's update: by the host, and in
    the device's memory."""

    copy: float
    disk: float
    adam: float
    on_device: float


def host_rates(plan: Plan, hardware: Hardware) -> HostRates:
    """Raises PlanError where `hardware` does not say what the plan's tier needs."""
    section = plan.run.offload
    check_tier(plan.run)
    copy, disk = hardware.host_bytes_per_second, hardware.disk_bytes_per_second
    touches = _ROUNDING_TOUCHES if _rounds(plan) else _ADAM_TOUCHES
    on_device = memory_seconds(touches * 4e8, hardware.rates.optimizer) / 1e8
    if hardware.device == "cpu":  # the device is the host's memory: a copy reads and writes it
        whole = memory_seconds(2e8, hardware.rates.memory) / 1e8
        update = memory_seconds(_ADAM_TOUCHES * 4e8, hardware.rates.optimizer) / 1e8
        return HostRates(whole, _per(disk, hardware, section=section), update, update)
    return HostRates(
        _per(copy, hardware, section=section, what="host_bytes_per_second"),
        _per(disk, hardware, section=section),
        1 / hardware.adam_per_second,
        on_device,
    )


def faster_update(plan: Plan, hardware: Hardware) -> Literal["host", "device"]:
    """Where the state of the plan's tier is updated sooner: what `offload.update = "auto"` is. The host,
    where the device's memory is the host's, or nothing is known of the way there. See [Note: tiers]."""
    section, copy = plan.run.offload, hardware.host_bytes_per_second
    if not section.takes_optimizer or hardware.device == "cpu" or copy is None:
        return "host"
    rates = host_rates(plan, hardware)
    into, out = _passing(plan, ITEMSIZE[plan.precision.master])
    there = rates.copy * max(into, out) + rates.on_device
    return "device" if there < rates.adam else "host"


def _per(
    rate: float | None,
    hardware: Hardware,
    *,
    section: OffloadSection,
    what: str = "disk_bytes_per_second",
) -> float:
    if rate is not None:
        return 1 / rate
    if what.startswith("disk") and not section.on_disk:
        return 0.0
    of_drive = what.startswith("disk")
    measures = " --drive DIRECTORY" if of_drive else ""
    given = ", or fullshard plan --drive-rate BYTES/S" if of_drive else ""
    raise PlanError(
        f"{hardware.name}: how fast its {'drive' if of_drive else 'host'} is is not known.",
        got=f'offload.tier = "{section.tier}", no {what}',
        fix=f"fullshard calibrate{measures} there, or a hardware.toml with {what}{given}",
    )


def with_untimed_drive(hardware: Hardware) -> Hardware:
    """The same hardware where nobody has measured the drive: for plans of all that does not need its rate. In
    them it takes no time, and what is predicted says so: see `OffloadTerms.disk_seconds`."""
    return hardware.model_copy(update={"disk_bytes_per_second": math.inf})


def with_host(cost: UnitCost, size: UnitBytes, *, plan: Plan, rates: HostRates) -> UnitCost:
    """The unit's costs with those of its tier. See [Note: tiers]."""
    section = plan.run.offload
    if not section.takes_optimizer:
        return cost
    compute = ITEMSIZE[plan.precision.param]
    state = _state_bytes(plan, size.master_itemsize) * size.trained
    moved = size.trained * compute
    on_disk, shards = section.on_disk, section.takes_parameters
    update = rates.adam * size.trained
    if section.update == "device":
        into, out = _passing(plan, size.master_itemsize)
        cost = replace(
            cost,
            update_in=ticks(rates.copy * into * size.trained),
            update=ticks(rates.on_device * size.trained),
            update_out=ticks(rates.copy * out * size.trained),
        )
    else:
        cost = replace(cost, update=ticks(update))
    if plan.device == "cpu" and not on_disk:
        return cost
    stays = not plan.gradients_leave
    written = state + (size.on_drive if shards else 0)
    return replace(
        cost,
        leave=0 if stays else ticks(rates.copy * size.reduce_output),
        add=0 if stays else ticks(update * 3 / _ADAM_TOUCHES),
        update_disk=ticks(rates.disk * (state + written)) if on_disk else 0,
        back=0 if shards else ticks(rates.copy * moved),
        fetch_disk=ticks(rates.disk * size.on_drive) if on_disk and shards else 0,
        shards_on_disk=size.on_drive if on_disk and shards else 0,
        fetch_frozen=ticks(rates.disk * size.frozen_on_drive) if on_disk and shards else 0,
        frozen_on_disk=size.frozen_on_drive if on_disk and shards else 0,
        fetch=ticks(rates.copy * (size.own_shards + size.frozen)) if shards else 0,
    )


def without_host(cost: UnitCost) -> UnitCost:
    """The same with an infinitely fast host and drive."""
    return replace(cost, **_NO_COST)


def norm_ticks(plan: Plan, trained: int, *, rates: HostRates) -> int:
    """The host's pass over the gradients for their global norm: one of the seven that an update makes."""
    return ticks(rates.adam * trained / _ADAM_TOUCHES) if plan.run.optimizer.clip_norm else 0


def gathers_of(
    plan: Plan, trace: Trace, *, costs: Sequence[UnitCost], counts: Sequence[int]
) -> tuple[int, ...]:
    """How often a step brings the own shard of each unit of the trace, over all that it stands for."""
    frees = plan.reshard_after_forward is not False
    times = plan.accumulation if frees else 1
    found: list[int] = []
    for index, (cost, count) in enumerate(zip(costs, counts, strict=True)):
        again = frees and cost.reshards and not cost.resharded
        begun = {p.event for p in trace.phases if p.unit == index}
        both = ("pre_forward" in begun) + (again and "pre_backward" in begun)
        found.append(times * count * both if cost.has_parameters else 0)
    return tuple(found)


class Busy(NamedTuple):
    """Ticks of a step that each of the host's streams is busy. `in_`, `out`: copies to the device, and from
    it."""

    disk: int
    update: int
    in_: int
    out: int


def busy_of(costs: Iterable[tuple[UnitCost, int, int]], *, reductions: int, norm: int, disk: int) -> Busy:
    """`costs`: of each unit, with how often it stands in the model and how often it is gathered a step.
    `disk`: of the drive besides updates; below 0 where it need not read all of their state."""
    update = into = out = 0
    for cost, count, gathers in costs:
        disk += count * cost.update_disk
        update += count * (cost.update + (reductions - 1) * cost.add)
        into += count * (cost.update_in + cost.back) + gathers * cost.fetch
        out += count * (cost.update_out + reductions * cost.leave)
    return Busy(max(0, disk), update + norm, into, out)


def least_shards_read(
    plan: Plan,
    units: Sequence[tuple[UnitCost, int, int]],  # signature: as `busy_of` has them
) -> int:
    """Bytes of shards that the drive reads in a step at least: what is updated is gathered once before it is
    read, and each way over the units begins with those that the way before has left in memory."""
    ways = 2 * plan.accumulation
    largest = max((cost.shards_on_disk for cost, *_ in units), default=0)
    again = sum(max(0, gathers - count) * cost.shards_on_disk for cost, count, gathers in units)
    largest_frozen = max((cost.frozen_on_disk for cost, *_ in units), default=0)
    frozen = sum(gathers * cost.frozen_on_disk for cost, _, gathers in units)
    there = ways * UNIT_BUFFERS
    return max(0, again - there * largest) + max(0, frozen - there * largest_frozen)


class SlotCounts(NamedTuple):
    """Bytes of a step's state that are in the three slots when the update begins: `kept` since the last one,
    which are not read again; `ahead`: read when that was written. `behind`: which are written last."""

    kept: int = 0
    ahead: int = 0
    behind: int = 0


def slots_hold(plan: Plan, records: Sequence[int]) -> SlotCounts:
    """`records`: of each group's state. When a group has been read, two before it may still be written."""
    section, places = plan.run.offload, range(len(records))
    if not section.on_disk or not records:
        return SlotCounts()
    last = set(places[-_SLOTS:])
    first = last if section.order == "alternate" else set(places[:_SLOTS])
    kept, ahead = (sum(records[at] for at in own) for own in (first & last, first - last))
    return SlotCounts(kept, ahead, sum(records[: _SLOTS - 1]))


def update_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Of the device's memory, for the update of a tier's state there: see [Note: tiers]."""
    section = plan.run.offload
    if not (section.takes_optimizer and section.update == "device"):
        return 0
    groups = list(_groups_of(spec, plan, rank=rank))
    if not groups:
        return 0
    largest = max(master + sum(_moment_sizes(plan, master)) + master for _, master in groups)
    return (2 * largest + (_ROUNDING_BYTES if _rounds(plan) else 0)) * piece_elements(
        group for group, _ in groups
    )


def records_of(spec: ModelSpec, plan: Plan) -> tuple[int, ...]:
    """Bytes of each group's state on rank 0."""
    return tuple(
        sum(part_bytes(group.numel, size) for size in (master, *_moment_sizes(plan, master)))
        for group, master in _groups_of(spec, plan, rank=0)
    )


def _groups_of(spec: ModelSpec, plan: Plan, *, rank: int) -> Iterator[tuple[Group, int]]:
    """A rank's groups, and bytes of an element of their masters."""
    held: list[ShardSize] = []
    itemsizes: dict[str, int] = {}
    for unit in sorted(spec.units, key=lambda unit: unit.position):
        settings = UnitSettings.of(plan, unit.override, kept=unit.kept)
        degree, master = settings.shard_degree, settings.precision.master
        itemsizes[master] = ITEMSIZE[master]
        for index, parameter in enumerate(unit.parameters):
            if parameter.requires_grad and parameter.shape:
                numel = shard_numel(parameter.shape, degree, rank=rank % degree)
                most = padded_numel(parameter.shape, degree) // degree
                held.append(ShardSize(f"{unit.position}.{index}", numel=numel, most=most, dtype=master))
    for group in group_shards(held, group_parameters=plan.run.offload.group_parameters):
        yield group, itemsizes[group.dtype]


def _rounds(plan: Plan) -> bool:
    """An update rounds masters or moments at random."""
    return plan.run.offload.moments != "fp32" or plan.precision.stochastic_rounding


def _moment_sizes(plan: Plan, master: int) -> tuple[int, int]:
    own = 2 if plan.run.offload.moments == "bf16" else master
    return own, own


def _state_bytes(plan: Plan, master: int) -> int:
    """Of an element: its master and both moments."""
    return master + sum(_moment_sizes(plan, master))


def _passing(plan: Plan, master: int) -> tuple[int, int]:
    """Bytes of an element that come to the device to be updated, its gradient too, and that leave it."""
    state = _state_bytes(plan, master)
    return state + master, state


def offload_terms(  # signature: what `step_time` knows of a tier
    plan: Plan,
    units: Sequence[tuple[UnitBytes, int]],
    *,
    records: Sequence[int],
    busy: Busy,
    shards_read: int,
    hardware: Hardware,
) -> OffloadTerms:
    """Bytes and seconds of the plan's tier; `units`: the sizes of each, and how often it stands in the model;
    `records`: of each group's state; `shards_read`: bytes of a step."""
    section = plan.run.offload
    compute = ITEMSIZE[plan.precision.param]
    trained = sum(size.trained * count for size, count in units)
    state, on_cpu = sum(records), plan.device == "cpu"
    each = [size for size, count in units for _ in range(count)] if section.takes_parameters else []
    shards = sum(size.own_shards + size.frozen for size in each)
    on_drive, frozen = [size.on_drive for size in each], [size.frozen_on_drive for size in each]
    segment = min(section.group_parameters, max((size.largest_trained for size, *_ in units), default=0))
    is_untimed = section.on_disk and hardware.disk_bytes_per_second == math.inf
    host, disk, read, written = 0, 0, 0, 0
    if not on_cpu:
        host = _SUM * trained + (0 if shards else segment * compute)
    if section.on_disk:
        host += min(_SLOTS, len(records)) * max(records, default=0)
        host += _in_buffers(on_drive) + _in_buffers(frozen)
        disk, written = 2 * (state + _PAYLOAD) + sum(on_drive) + sum(frozen), state + sum(on_drive)
        read = state - slots_hold(plan, records).kept + shards_read
    else:
        host += state + (0 if on_cpu else shards)
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


def _in_buffers(units: Sequence[int]) -> int:
    """Of what of each unit is on the drive."""
    return min(UNIT_BUFFERS, sum(size > 0 for size in units)) * max(units, default=0)
