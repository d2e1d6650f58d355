"""Work of an offload target on the host's and drive's streams. See [Note: tiers] in `planner.offload`."""

from dataclasses import dataclass, field

from fullshard.planner.streams import Streams
from fullshard.planner.unit_costs import UnitCost
from fullshard.spec.groups import UNIT_BUFFERS


@dataclass
class InBuffers:
    """Units in the host's buffers, the most recently used last.

    See [Note: units in memory] in `offload.unit_buffers`.
    """

    trained: list[int] = field(default_factory=list[int])  # units whose own shards are buffered
    frozen: list[int] = field(default_factory=list[int])  # units whose frozen shards are buffered

    @property
    def kinds(self) -> tuple[list[int], list[int]]:
        return self.trained, self.frozen


def fetch_shard(streams: Streams, cost: UnitCost, *, updates: bool, reads: bool, reads_frozen: bool) -> int:
    """Loads a unit's own shard to the device before its all-gather; returns when it is there.

    updates: this is the unit's first gather of the step, so its group is updated first.
    reads: its own shard is on the drive and not in a buffer.
    reads_frozen: its frozen shard is on the drive and not in a buffer.
    """
    ready = 0
    if reads_frozen:
        streams.shards_read += cost.frozen_on_disk
        ready = streams.disk = max(streams.disk, streams.fetched) + cost.fetch_frozen
    if updates and cost.update:
        streams.disk += cost.update_disk
        if streams.serial:  # only the drive works in parallel
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
    """Returns whether the unit was in `buffers`, and marks it most recently used."""
    was_there = unit in buffers
    buffers[:] = [*(one for one in buffers if one != unit), unit][-UNIT_BUFFERS:]
    return was_there


def _update(streams: Streams, cost: UnitCost) -> int:
    """Updates state in host memory; returns when the result is there."""
    if not cost.update_in:
        streams.updating = max(streams.updating, streams.disk) + cost.update
        return streams.updating
    # Pieces are copied out while others are copied in: when the last is in, about one piece is left to copy
    # out. Gradients have left before. Contention with activations that leave meanwhile is ignored.
    into = streams.host_in = max(streams.host_in, streams.disk) + cost.update_in
    busy = streams.updating + max(cost.update, cost.update_out)
    streams.updating = max(busy, into + cost.update)
    return streams.updating


def offload_gradient(streams: Streams, cost: UnitCost, *, adds: bool) -> None:
    """Copies a reduced gradient to the host. `adds`: and adds it to the gradient there."""
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
    """Waits until all gradients are on the host, and for `norm` ticks while the host computes their norm."""
    streams.wait(max(streams.host_out, streams.host_sum), "host")
    _spend(streams, norm)


def _spend(streams: Streams, length: int) -> int:
    """Makes computing wait `length` ticks for the host; returns the compute clock."""
    streams.wait(streams.compute + length, "host")
    return streams.compute
