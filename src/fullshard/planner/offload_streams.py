"""What a tier puts on the streams of the host and of its drive. See [Note: tiers] in `planner.offload`."""

from dataclasses import dataclass, field

from fullshard.planner.streams import Streams
from fullshard.planner.unit_costs import UnitCost
from fullshard.spec.groups import UNIT_BUFFERS


@dataclass
class InBuffers:
    """The units whose own shards are in the host's buffers, the one used last last; and those of whom what is
    frozen is in those of its own. See [Note: units in memory] in `offload.unit_buffers`."""

    trained: list[int] = field(default_factory=list[int])
    frozen: list[int] = field(default_factory=list[int])

    @property
    def kinds(self) -> tuple[list[int], list[int]]:
        return self.trained, self.frozen


def fetch_shard(streams: Streams, cost: UnitCost, *, updates: bool, reads: bool, reads_frozen: bool) -> int:
    """What comes before a unit is gathered; returns when its own shard is on the device.

    `updates`: it was not gathered yet in this step, so its group is updated first. `reads`: its own shard
    is on the drive, and in no buffer; `reads_frozen`: what of it is frozen.
    """
    ready = 0
    if reads_frozen:
        streams.shards_read += cost.frozen_on_disk
        ready = streams.disk = max(streams.disk, streams.fetched) + cost.fetch_frozen
    if updates and cost.update:
        streams.disk += cost.update_disk
        if streams.serial:  # only the drive works beside
            streams.wait(streams.disk, "host")
            ready = _spend(streams, cost.update_in + cost.update_out + cost.update + cost.back)
        else:
            ready = max(ready, _update(streams, cost))
            if cost.back:
                ready = streams.host_in = max(streams.host_in, ready) + cost.back
    if reads:
        streams.shards_read += cost.shards_on_disk
        ready = streams.disk = max(streams.disk, streams.fetched, ready) + cost.fetch_disk
    if not cost.fetch:
        return ready
    if streams.serial:
        streams.wait(ready, "host")
        return _spend(streams, cost.fetch)
    streams.host_in = max(streams.host_in, ready, streams.fetched) + cost.fetch
    return streams.host_in


def touch_buffer(unit: int, buffers: list[int]) -> bool:
    """Whether what is gathered of the unit was in one of these `buffers`, where it is now as used last."""
    was_there = unit in buffers
    buffers[:] = [*(one for one in buffers if one != unit), unit][-UNIT_BUFFERS:]
    return was_there


def _update(streams: Streams, cost: UnitCost) -> int:
    """Of state that is in the host's memory; returns when it is there again."""
    if not cost.update_in:
        streams.updating = max(streams.updating, streams.disk) + cost.update
        return streams.updating
    # Pieces go out beside others that come in: when the last is in, hardly more than that is left to go out.
    # Gradients have left before; activations that leave meanwhile are planned as if they did not meet them.
    into = streams.host_in = max(streams.host_in, streams.disk) + cost.update_in
    busy = streams.updating + max(cost.update, cost.update_out)
    streams.updating = max(busy, into + cost.update)
    return streams.updating


def offload_gradient(streams: Streams, cost: UnitCost, *, adds: bool) -> None:
    """A reduced gradient goes to the host; `adds`: to what is there of it."""
    if not cost.leave:
        return
    if streams.serial:
        _spend(streams, cost.leave + (cost.add if adds else 0))
        return
    done = max(streams.reduce, streams.all_reduce) if cost.is_replicated else streams.reduce
    streams.host_out = max(streams.host_out, done) + cost.leave
    if adds:
        streams.host_sum = max(streams.host_sum, streams.host_out) + cost.add
    streams.previous_gradient_out, streams.last_gradient_out = streams.last_gradient_out, streams.host_out


def wait_for_gradients(streams: Streams, *, norm: int) -> None:
    """The step ends with all gradients on the host, and their norm known, which takes `norm`."""
    streams.wait(max(streams.host_out, streams.host_sum), "host")
    _spend(streams, norm)


def _spend(streams: Streams, length: int) -> int:
    """Computing waits so long for the host."""
    streams.wait(streams.compute + length, "host")
    return streams.compute
