"""Clocks of one rank's streams, and FSDP2's work on them, in the order in which FSDP2 issues it.

[Note: FSDP2's order]
This is `torch.distributed.fsdp._fully_shard` (2.11 to 2.13) on CUDA. The host issues everything and never
waits:

gather        copied into its buffer on a copy-in stream, sent on the all-gather stream. Both first wait for a
              copy-out: in forward that of the unit before the last gathered one (two buffers), in backward
              that of the last. With `prefetch.mode = none`, the copy is on the compute stream, and the send
              follows it.
wait          the compute stream waits for the gather, and copies the parameters out.
prefetch      forward, implicit: none is requested; the host has already run ahead to the next unit.
              Backward, implicit: once a unit is unsharded, the one that ran forward before it. Explicit: the
              next units in registration order, after each unit's own gather in forward and in backward.
reduce        the compute stream waits for the previous reduce-scatter (only one input buffer lives) and
              copies gradients in; the reduce-scatter stream sends, casts and adds. Replicas are all-reduced
              on a stream of their own, in the last microbatch only.
communicator  gathers and reduce-scatters over the shard axis share one NCCL communicator, which runs them in
              the order of issue. A gather over fewer ranks (hpZ) and the all-reduce have their own. They
              overlap the others if one is within nodes and the other across. Over the same links, no two take
              less than the sum of their times, so they are put in the same queue.
end           after each backward the compute stream waits for all reductions. At the next root's forward the
              gather streams wait for the compute stream.

offload       see [Note: tiers] in `planner.offload`. Before a unit's first all-gather of the step its group
              is updated: the drive, the host's update and the copy to the device each process their own
              queue. With params+, each all-gather's own shard is copied in while the previous one is sent. A
              reduced gradient is copied out after its reduction; the next but one waits for it.

activations   see [Note: activations on the host] in `planner.offload`.

On the CPU there is one timeline: the host computes, copies, and (`overlap` 0) waits in each collective.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fullshard.planner.predict.unit_costs import UnitCost
from fullshard.spec.groups import UNIT_BUFFERS

Cause = Literal["all_gather", "reduce_scatter", "all_reduce", "copy", "host"]
HostStream = Literal["disk", "updating", "host_in", "host_out", "host_sum"]


class RecordedWork(NamedTuple):
    """Work on a stream, or a wait, from tick `begin` to tick `end`.

    kind: the work on that stream; a cause for a wait
    phase, unit, microbatch: what it is for; unit -1: none
    """

    stream: str
    kind: str
    begin: int
    end: int
    phase: str
    unit: int
    microbatch: int


@dataclass(slots=True)
class StreamClocks:
    """Clocks (the tick at which each stream finishes its queued work), and sums of ticks spent.

    compute = computed + copied + sum of waited_*
    """

    serial: bool  # host and device share one timeline
    blocking: float = 0.0  # fraction of a collective that computing always waits for
    recorded: list[RecordedWork] | None = None  # all work, if it is to be recorded
    purpose: tuple[str, int, int] = ("", -1, 0)  # event, unit and microbatch that the work is for
    host: int = 0
    compute: int = 0
    copy_in: int = 0
    gather: int = 0
    network: int = 0  # communicator of the shard axis, and collectives that share its links
    hpz_network: int = 0  # gathers over fewer ranks, if over other links
    reduce: int = 0
    all_reduce: int = 0
    reduce_input_free: int = 0  # when the reduce-scatter's input may be freed
    copied_out: int = 0  # copy-out that the gather streams wait for at forward's next copy-out
    disk: int = 0
    updating: int = 0  # the host's update
    host_in: int = 0  # copies to the device
    fetched: int = 0  # when the last own shard that was copied in may be freed
    host_out: int = 0  # copies from the device
    last_gradient_out: int = 0  # end of the last gradient's copy to the host
    previous_gradient_out: int = 0  # end of the copy before that one
    host_sum: int = 0  # the host's sums of gradients
    activation_copy: int = 0  # the last copies of activations
    computed: int = 0  # time in kernels, including `idle`
    copied: int = 0  # time in copies
    waited_all_gather: int = 0  # time in which the compute stream waited, by cause
    waited_reduce_scatter: int = 0
    waited_all_reduce: int = 0
    waited_host: int = 0
    idle: int = 0  # gaps in which the compute stream waited for the host
    sent: int = 0  # time of all collectives
    shards_read: int = 0  # bytes of shards that the drive reads for gathers
    slack: int = 0  # the host's least lead since its reset; negative if the compute stream waited

    def run_kernels(self, length: int, *, issue: int) -> None:
        """Runs kernels for `length` ticks on the compute stream. The host launches them in `issue` ticks."""
        if self.serial:
            self.compute += length + issue
            self.computed += length + issue
            self.host = self.compute
            self._record("compute", "kernels", length + issue, end=self.compute)
            return
        done, issued = self.compute + length, self.host + max(length, issue)
        self.slack = min(self.slack, done - issued)
        end = max(done, issued)
        self.computed += end - self.compute
        self.idle += end - done
        self._record("compute", "launches", end - done, end=end - length)
        self._record("compute", "kernels", length, end=end)
        self.compute = end
        self.host += issue
        self._record("host", "launches", issue, end=self.host)

    def run_fsdp_host_work(self, length: int) -> None:
        """Adds `length` ticks of FSDP2's own work on the host."""
        self.host += length
        self._record("compute" if self.serial else "host", "FSDP2", length, end=self.host)
        if self.serial:
            self.compute = self.host
            self.copied += length

    def copy_on_compute_stream(self, length: int) -> None:
        if not length:
            return
        self._wait_for_host_launch()
        self.compute += length
        self.copied += length
        self._record("compute", "copies", length, end=self.compute)
        if self.serial:
            self.host = self.compute

    def stall_compute_until(self, until: int, cause: Cause) -> None:
        """Makes the compute stream wait until tick `until`."""
        gap = until - self.compute
        if gap <= 0:
            return
        self.compute = until
        self._add_waiting_time(gap, cause)
        if self.serial:
            self.host = self.compute

    def start_all_gather(self, cost: UnitCost, *, again: bool, inline: bool, after: int) -> int:
        """Issues an all-gather, and returns when it ends. `after`: the earliest tick for its copy-in."""
        into, length = (cost.again_in, cost.backward_gather) if again else (cost.copy_in, cost.gather)
        inline = inline or self.serial
        if inline:
            self.stall_compute_until(after, "host")
            self.copy_on_compute_stream(into)
            start = self.compute
        else:
            ready = max(self.copy_in, after)
            self.slack = min(self.slack, ready - self.host)
            self.copy_in = max(ready, self.host) + into
            self._record("copy_in", "copies", into, end=self.copy_in)
            start = max(self.gather, self.copy_in)
        if again and cost.separate_network:
            end = self.hpz_network = max(start, self.hpz_network) + length
            self._record("hpz_network", "all_gathers", length, end=end)
        else:
            end = self.network = max(start, self.network) + length
            self._record("gather", "all_gathers", length, end=end)
        if not inline:
            self.gather = end
        self.fetched = start if inline else self.copy_in
        self._add_sent_and_blocked_time(length, "all_gather")
        return end

    def delay_gather_streams(self, until: int) -> None:
        """Makes the copy-in and all-gather streams wait until tick `until`."""
        self.copy_in = max(self.copy_in, until)
        self.gather = max(self.gather, until)

    def run_reduce_scatter(self, cost: UnitCost) -> None:
        """Copies gradients into the buffer, and runs the reduce-scatter (over one rank, a copy)."""
        self.reduce = max(self.reduce, self.previous_gradient_out)
        self.stall_compute_until(self.reduce_input_free, "reduce_scatter" if cost.is_sharded else "copy")
        self.copy_on_compute_stream(cost.pack)
        if not cost.is_sharded:
            self.copy_on_reduce_stream(cost.scatter)
        else:
            end = max(self.reduce, self.compute, self.network) + cost.scatter
            self.network = self.reduce = end
            self._record("reduce", "reduce_scatters", cost.scatter, end=end)
            self._add_sent_and_blocked_time(cost.scatter, "reduce_scatter")
        self.reduce_input_free = self.reduce

    def copy_activations(self, *, out: int, back: int, waits: bool) -> None:
        """Waits for activations in transit if `waits`, then starts copies to and from the host."""
        if waits:
            self.stall_compute_until(self.activation_copy, "host")
        if out:
            self.activation_copy = self.run_on_stream("host_out", out, after=self.compute)
        if back:
            self.activation_copy = self.run_on_stream("host_in", back, after=self.compute)

    def run_on_stream(self, stream: HostStream, length: int, *, after: int) -> int:
        """Runs `length` ticks of work on a stream of the host or the drive, and returns when it ends.

        The work starts after the stream's queued work, and not before tick `after`.
        """
        end = max(getattr(self, stream), after) + length
        setattr(self, stream, end)
        self._record(stream, stream, length, end=end)
        return end

    def copy_on_reduce_stream(self, length: int) -> None:
        """Runs a copy on the reduce-scatter stream, after the compute stream's queued work."""
        if self.serial:
            self.copy_on_compute_stream(length)
            length = 0
        self.reduce = max(self.reduce, self.compute) + length
        self._record("reduce", "copies", length, end=self.reduce)

    def start_all_reduce(self, cost: UnitCost, *, settle: int) -> None:
        """Runs the all-reduce over replicas, and then the cast, which takes `settle` ticks."""
        end = max(self.all_reduce, self.reduce) + cost.all_reduce
        if cost.shares_wires:
            end = self.network = max(self.all_reduce, self.reduce, self.network) + cost.all_reduce
        self._record("all_reduce", "all_reduces", cost.all_reduce, end=end)
        self._add_sent_and_blocked_time(cost.all_reduce, "all_reduce")
        if self.serial:
            self.copy_on_compute_stream(settle)
            self.all_reduce = max(end, self.compute)
        else:
            self.all_reduce = end + settle
            self._record("all_reduce", "copies", settle, end=self.all_reduce)

    def wait_for_reductions(self, *, is_sharded: bool) -> None:
        self.stall_compute_until(self.reduce, "reduce_scatter" if is_sharded else "copy")
        self.stall_compute_until(self.all_reduce, "all_reduce")

    def _add_sent_and_blocked_time(self, length: int, cause: Cause) -> None:
        self.sent += length
        if self.blocking and length:
            blocked = round(self.blocking * length)
            self.compute += blocked
            self._add_waiting_time(blocked, cause)
            if self.serial:
                self.host = self.compute

    def _add_waiting_time(self, length: int, cause: Cause) -> None:
        name = "copied" if cause == "copy" else f"waited_{cause}"
        setattr(self, name, getattr(self, name) + length)
        self._record("compute", cause, length, end=self.compute)

    def _wait_for_host_launch(self) -> None:
        gap = self.host - self.compute
        self.slack = min(self.slack, -gap)
        if gap > 0:
            self.compute = self.host
            self.computed += gap
            self.idle += gap
            self._record("compute", "launches", gap, end=self.compute)

    def _record(self, stream: str, kind: str, length: int, *, end: int) -> None:
        if self.recorded is not None and length > 0:
            self.recorded.append(RecordedWork(stream, kind, end - length, end, *self.purpose))


@dataclass
class BufferedUnits:
    """Units in the host's buffers, in order of use. See [Note: units in memory] in `offload.drive_shards`."""

    trained: list[int] = field(default_factory=list[int])  # units whose own shards are buffered
    frozen: list[int] = field(default_factory=list[int])  # units whose frozen shards are buffered

    @property
    def unit_lists(self) -> tuple[list[int], list[int]]:
        return self.trained, self.frozen


def simulate_shard_fetch(
    streams: StreamClocks, cost: UnitCost, *, updates: bool, reads: bool, reads_frozen: bool
) -> int:
    """Loads a unit's own shard to the device before its all-gather, and returns when it is there.

    updates: this is the unit's first gather of the step, so its group is updated first.
    reads, reads_frozen: its own shard, or its frozen shard, must be read from the drive.
    """
    ready = 0
    if reads_frozen:
        streams.shards_read += cost.frozen_on_disk
        ready = streams.run_on_stream("disk", cost.fetch_frozen, after=streams.fetched)
    if updates and cost.update:
        streams.run_on_stream("disk", cost.update_disk, after=streams.disk)
        if streams.serial:  # only the drive works in parallel
            streams.stall_compute_until(streams.disk, "host")
            ready = _stall_for_host_work(streams, cost.update_in + cost.update_out + cost.update + cost.back)
        else:
            ready = max(ready, _simulate_offloaded_update(streams, cost))
            if cost.back:
                ready = streams.run_on_stream("host_in", cost.back, after=ready)
    if reads:
        streams.shards_read += cost.shards_on_disk
        ready = streams.run_on_stream("disk", cost.fetch_disk, after=max(streams.fetched, ready))
    if not cost.fetch:
        return ready
    if streams.serial:
        streams.stall_compute_until(ready, "host")
        return _stall_for_host_work(streams, cost.fetch)
    return streams.run_on_stream("host_in", cost.fetch, after=max(ready, streams.fetched))


def touch_lru_buffer(unit: int, buffers: list[int]) -> bool:
    """Marks `unit` as the most recently used of `buffers`, and returns True if it was among them."""
    was_there = unit in buffers
    buffers[:] = [*(one for one in buffers if one != unit), unit][-UNIT_BUFFERS:]
    return was_there


def _simulate_offloaded_update(streams: StreamClocks, cost: UnitCost) -> int:
    """Updates a group's state, and returns the tick at which the result is in host memory."""
    if not cost.update_in:
        return streams.run_on_stream("updating", cost.update, after=streams.disk)
    # Pieces are copied out while others are copied in: when the last is in, about one piece is left to copy
    # out. Gradients have left before. Contention with activations that leave meanwhile is ignored.
    into = streams.run_on_stream("host_in", cost.update_in, after=streams.disk)
    busy = max(cost.update, cost.update_out)
    return streams.run_on_stream("updating", busy, after=into + cost.update - busy)


def simulate_gradient_offload(streams: StreamClocks, cost: UnitCost, *, adds: bool) -> None:
    """Copies a reduced gradient to the host. With `adds`, it is added to the gradient there."""
    if not cost.leave:
        return
    if streams.serial:
        _stall_for_host_work(streams, cost.leave + (cost.add if adds else 0))
        return
    done = max(streams.reduce, streams.all_reduce) if cost.is_replicated else streams.reduce
    streams.run_on_stream("host_out", cost.leave, after=done)
    if adds:
        streams.run_on_stream("host_sum", cost.add, after=streams.host_out)
    streams.previous_gradient_out, streams.last_gradient_out = streams.last_gradient_out, streams.host_out


def wait_for_offloaded_gradients(streams: StreamClocks, *, norm: int) -> None:
    """Waits until all gradients are on the host, and `norm` ticks more while the host computes their norm."""
    streams.stall_compute_until(max(streams.host_out, streams.host_sum), "host")
    _stall_for_host_work(streams, norm)


def _stall_for_host_work(streams: StreamClocks, length: int) -> int:
    """Makes the compute stream wait `length` ticks for the host, and returns its clock."""
    streams.stall_compute_until(streams.compute + length, "host")
    return streams.compute
