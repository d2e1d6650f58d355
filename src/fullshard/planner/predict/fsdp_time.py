"""Costs of FSDP2's events, and the clocks of one rank's streams, with FSDP2's work in the order of issue.

Times are whole picoseconds (`TICKS` per second). Sums are exact, so a simulation detects a repeated state.

[Note: FSDP2's order]
This is `torch.distributed.fsdp._fully_shard` (2.11 to 2.13) on CUDA. The host issues all and never waits:

gather        copied into its buffer on a copy-in stream, sent on the all-gather stream. Both first wait for a
              copy-out: in forward that of the unit before the last gathered one (two buffers), in backward
              that of the last.
wait          the compute stream waits for the gather, and copies the parameters out.
prefetch      forward: none is requested; the host has already run ahead to the next unit. Backward: once a
              unit is unsharded, the one that ran forward before it.
reduce        the compute stream waits for the previous reduce-scatter (only one input buffer lives) and
              copies gradients in; the reduce-scatter stream sends, casts and adds. Replicas are all-reduced
              on a stream of their own, in the last microbatch only.
communicator  gathers and reduce-scatters over the shard axis share one NCCL communicator, which runs them in
              the order of issue. The all-reduce has its own. It overlaps the others if one is within nodes
              and the other across. Over the same links, no two take less than the sum of their times, so
              they are put in the same queue.
end           after each backward the compute stream waits for all reductions. At the next root's forward the
              gather streams wait for the compute stream.

offload       see [Note: tiers] in `planner.predict.offload`. Before a unit's first all-gather of the step
              its group is updated: the drive, the host's update and the copy to the device each process
              their own queue. With params+, the rank's shard is copied in while the previous all-gather
              is sent. A reduced gradient is copied out after its reduction; the next but one waits for it.

activations   see [Note: activations on the host] in `planner.predict.offload`.

On the CPU there is one timeline: the host computes, copies, and (`overlap` 0) waits in each collective.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from fullshard.planner.predict import collectives
from fullshard.planner.predict.phases import memory_access_seconds
from fullshard.planner.predict.unit_bytes import UnitBytes
from fullshard.spec.groups import UNIT_BUFFERS
from fullshard.spec.machine.hardware import Hardware

TICKS = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Ticks of FSDP2's events on one unit, and the properties that decide which events occur."""

    has_parameters: bool
    is_trained: bool  # it has gradients
    is_sharded: bool  # its shard degree is above 1
    is_replicated: bool  # its replicate degree is above 1
    reshards: bool  # it is resharded after forward
    gathers_in_backward: bool  # once resharded, it is gathered again for backward
    shares_wires: bool  # the all-reduce uses the same links as the shard axis
    copy_in: int  # the rank's shard cast and copied into the all-gather buffer
    gather: int  # the all-gather
    copy_out: int  # parameters copied out of the buffer
    pack: int  # gradients copied into the reduce-scatter buffer
    scatter: int  # the reduce-scatter; over one rank, a copy
    cast_gradient: int  # the reduced chunk cast to the master dtype
    settle_again: int  # the reduced chunk cast, and added to an earlier gradient
    add_partial: int  # a chunk not yet reduced over replicas, added to an earlier one
    all_reduce: int  # over replicas
    keep_unsynced: int  # unsharded gradients cast to the reduce dtype, without sync
    keep_again: int  # unsharded gradients cast and added to earlier ones, without sync
    # Costs of an offload target: see [Note: tiers] in `planner.predict.offload`.
    leave: int = 0  # the reduced chunk copied to the host
    add: int = 0  # the chunk added to an earlier one on the host
    update_disk: int = 0  # the group's state read from the drive and written
    update_in: int = 0  # state and gradients copied in for an update on the device
    update: int = 0  # the update
    update_out: int = 0  # state copied out after an update on the device
    back: int = 0  # updated parameters copied to the device
    fetch_disk: int = 0  # the rank's shard read from the drive before an all-gather
    fetch: int = 0  # the rank's shard copied from the host before an all-gather
    shards_on_disk: int = 0  # bytes of the rank's shard on the drive
    fetch_frozen: int = 0  # the frozen shard read from the drive
    frozen_on_disk: int = 0  # bytes of the frozen shard on the drive


def resident_unit_cost(size: UnitBytes, hardware: Hardware, *, world_size: int) -> UnitCost:
    """Returns a unit's costs, those of an offload target 0, from the bytes that `_fsdp_collectives` moves."""
    degree, apart, per_node = size.shard_degree, size.rank_distance, hardware.ranks_per_node
    layout = partial(collectives.shard_group_layout, per_node=per_node, world_size=world_size)
    shard = layout(degree, distance=apart)
    replicate = collectives.replicate_group_layout(size.replicate_degree, degree * apart, per_node=per_node)

    def traffic_ticks(*counts: int) -> int:
        return to_ticks(memory_access_seconds(sum(counts), hardware.rates.memory))

    def collective_ticks(
        kind: collectives.Collective, count: int, *, group: collectives.CollectiveLayout
    ) -> int:
        return to_ticks(collectives.collective_seconds(kind, count, group=group, hardware=hardware))

    part, sharded = size.gathered // degree, degree > 1
    cast_in = size.shards + size.cast_copy if size.cast_copy and size.shards else 0
    cast_in += 16 * size.in_fp8  # scaled and limited in fp32, before the cast
    into = traffic_ticks(cast_in, 2 * part) if sharded else 0
    reduced, chunk, gradient = size.reduce_input, size.reduce_output, size.gradient
    scatter = collective_ticks("reduce_scatter", reduced, group=shard)
    gather = collective_ticks("all_gather", size.gathered, group=shard)
    if (wires := size.gather_wires) is not None:
        gather = collective_ticks("all_gather", wires.sent, group=shard) + traffic_ticks(wires.traffic)
    if (wires := size.reduce_wires) is not None:
        near = layout(wires.near, distance=apart)
        far = layout(degree // wires.near, distance=wires.near * apart)
        exchange = wires.exchanges * collectives.all_to_all_seconds(wires.each, group=near, hardware=hardware)
        exchange += collectives.all_to_all_seconds(wires.sent, group=far, hardware=hardware)
        scatter = to_ticks(exchange) + traffic_ticks(wires.traffic)
    cast_out = (chunk, gradient) if gradient != chunk else ()
    same = size.whole == size.whole_reduced
    # Over one rank, shards are cast one by one and then copied.
    copy_out = traffic_ticks(0 if sharded else cast_in, 2 * size.gathered + 2 * size.unpacking)
    pack = traffic_ticks(size.whole, reduced)
    pack += traffic_ticks(2 * size.unpacking) if size.trained_parameters else 0
    return UnitCost(
        has_parameters=size.gathered > 0,
        is_trained=reduced > 0,
        is_sharded=sharded,
        is_replicated=size.replicate_degree > 1,
        reshards=size.reshards,
        gathers_in_backward=size.gathers_in_backward,
        shares_wires=sharded and (replicate.nodes > 1) == (shard.nodes > 1),
        copy_in=into,
        gather=gather,
        copy_out=copy_out,
        pack=pack,
        scatter=scatter if sharded else traffic_ticks(2 * reduced),
        cast_gradient=traffic_ticks(*cast_out),
        settle_again=traffic_ticks(*cast_out, 3 * gradient),
        add_partial=traffic_ticks(3 * chunk),
        all_reduce=collective_ticks("all_reduce", chunk, group=replicate),
        keep_unsynced=0 if same else traffic_ticks(size.whole, size.whole_reduced),
        keep_again=0 if same else traffic_ticks(size.whole, 2 * size.whole_reduced),
    )


def to_ticks(seconds: float) -> int:
    """Returns `seconds` as whole picoseconds."""
    return round(seconds * TICKS)


Cause = Literal["all_gather", "reduce_scatter", "all_reduce", "copy", "host"]
HostStream = Literal["disk", "updating", "host_in", "host_out", "host_sum"]


@dataclass(slots=True)
class StreamClocks:
    """Clocks (the tick at which each stream finishes its queued work), and sums of ticks spent.

    compute = computed + copied + sum of waited_*
    """

    serial: bool  # host and device share one timeline
    blocking: float = 0.0  # fraction of a collective that computing always waits for
    host: int = 0
    compute: int = 0
    copy_in: int = 0
    gather: int = 0
    network: int = 0  # communicator of the shard axis, and collectives that share its links
    reduce: int = 0
    all_reduce: int = 0
    reduce_input_free: int = 0  # when the reduce-scatter's input may be freed
    copied_out: int = 0  # copy-out that the gather streams wait for at forward's next copy-out
    disk: int = 0
    updating: int = 0  # the host's update
    host_in: int = 0  # copies to the device
    fetched: int = 0  # when the last shard that was copied in may be freed
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
            return
        done, issued = self.compute + length, self.host + max(length, issue)
        self.slack = min(self.slack, done - issued)
        end = max(done, issued)
        self.computed += end - self.compute
        self.idle += end - done
        self.compute = end
        self.host += issue

    def run_kernels_between_waits(self, length: int, *, issue: int, waits: int) -> None:
        """Runs kernels in `waits` + 1 equal parts, between which the host waits for the device."""
        for part in range(waits + 1, 0, -1):
            now, launched = length // part, issue // part
            length, issue = length - now, issue - launched
            self.run_kernels(now, issue=launched)
            if part > 1:
                self.host = max(self.host, self.compute)

    def run_fsdp_host_work(self, length: int) -> None:
        """Adds `length` ticks of FSDP2's own work on the host."""
        self.host += length
        if self.serial:
            self.compute = self.host
            self.copied += length

    def copy_on_compute_stream(self, length: int) -> None:
        if not length:
            return
        self._wait_for_host_launch()
        self.compute += length
        self.copied += length
        if self.serial:
            self.host = self.compute

    def stall_compute_until(self, until: int, cause: Cause) -> None:
        gap = until - self.compute
        if gap <= 0:
            return
        self.compute = until
        self._add_waiting_time(gap, cause)
        if self.serial:
            self.host = self.compute

    def start_all_gather(self, cost: UnitCost, *, after: int) -> int:
        """Issues an all-gather, and returns when it ends. `after`: the earliest tick for its copy-in."""
        if self.serial:
            self.stall_compute_until(after, "host")
            self.copy_on_compute_stream(cost.copy_in)
            start = self.compute
        else:
            ready = max(self.copy_in, after)
            self.slack = min(self.slack, ready - self.host)
            self.copy_in = max(ready, self.host) + cost.copy_in
            start = max(self.gather, self.copy_in)
        end = self.network = max(start, self.network) + cost.gather
        if not self.serial:
            self.gather = end
        self.fetched = start if self.serial else self.copy_in
        self._count_sent_and_block_compute(cost.gather, "all_gather")
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
            self._count_sent_and_block_compute(cost.scatter, "reduce_scatter")
        self.reduce_input_free = self.reduce

    def copy_activations(self, *, out: int, back: int, waits: bool) -> None:
        """Waits for activations in transit if `waits`, then starts copies to and from the host."""
        if waits:
            self.stall_compute_until(self.activation_copy, "host")
        if out:
            self.activation_copy = self.run_on_host_stream("host_out", out, after=self.compute)
        if back:
            self.activation_copy = self.run_on_host_stream("host_in", back, after=self.compute)

    def run_on_host_stream(self, stream: HostStream, length: int, *, after: int) -> int:
        """Runs `length` ticks of work on a stream of the host or the drive, and returns when it ends.

        The work starts after the stream's queued work, and not before tick `after`.
        """
        end = max(getattr(self, stream), after) + length
        setattr(self, stream, end)
        return end

    def copy_on_reduce_stream(self, length: int) -> None:
        """Runs a copy on the reduce-scatter stream, after the compute stream's queued work."""
        if self.serial:
            self.copy_on_compute_stream(length)
            length = 0
        self.reduce = max(self.reduce, self.compute) + length

    def start_all_reduce(self, cost: UnitCost, *, settle: int) -> None:
        """Runs the all-reduce over replicas, and then the cast, which takes `settle` ticks."""
        end = max(self.all_reduce, self.reduce) + cost.all_reduce
        if cost.shares_wires:
            end = self.network = max(self.all_reduce, self.reduce, self.network) + cost.all_reduce
        self._count_sent_and_block_compute(cost.all_reduce, "all_reduce")
        if self.serial:
            self.copy_on_compute_stream(settle)
            self.all_reduce = max(end, self.compute)
        else:
            self.all_reduce = end + settle

    def _count_sent_and_block_compute(self, length: int, cause: Cause) -> None:
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

    def _wait_for_host_launch(self) -> None:
        gap = self.host - self.compute
        self.slack = min(self.slack, -gap)
        if gap > 0:
            self.compute = self.host
            self.computed += gap
            self.idle += gap


class BufferedUnits(NamedTuple):
    """Units in the host's buffers, in order of use. See [Note: units in memory] in `gather_source.py`."""

    trained: list[int]  # units whose trained shards are buffered
    frozen: list[int]  # units whose frozen shards are buffered


def simulate_update_and_shard_fetch(
    streams: StreamClocks, cost: UnitCost, *, updates: bool, reads: bool, reads_frozen: bool
) -> int:
    """Loads the rank's shard of a unit to the device before its all-gather, and returns when it is there.

    updates: this is the unit's first gather of the step, so its group is updated first.
    reads, reads_frozen: the trained, or the frozen, shard must be read from the drive.
    """
    ready = 0
    if reads_frozen:
        streams.shards_read += cost.frozen_on_disk
        ready = streams.run_on_host_stream("disk", cost.fetch_frozen, after=streams.fetched)
    if updates and cost.update:
        streams.run_on_host_stream("disk", cost.update_disk, after=streams.disk)
        if streams.serial:  # only the drive works in parallel
            streams.stall_compute_until(streams.disk, "host")
            ready = _stall_for_host_work(streams, cost.update_in + cost.update_out + cost.update + cost.back)
        else:
            ready = max(ready, _simulate_offloaded_update(streams, cost))
            if cost.back:
                ready = streams.run_on_host_stream("host_in", cost.back, after=ready)
    if reads:
        streams.shards_read += cost.shards_on_disk
        ready = streams.run_on_host_stream("disk", cost.fetch_disk, after=max(streams.fetched, ready))
    if not cost.fetch:
        return ready
    if streams.serial:
        streams.stall_compute_until(ready, "host")
        return _stall_for_host_work(streams, cost.fetch)
    return streams.run_on_host_stream("host_in", cost.fetch, after=max(ready, streams.fetched))


def reuse_buffer(unit: int, buffers: list[int]) -> bool:
    """Makes `unit` the last of the UNIT_BUFFERS most recently used, and returns True if it was among them."""
    was_there = unit in buffers
    buffers[:] = [*(one for one in buffers if one != unit), unit][-UNIT_BUFFERS:]
    return was_there


def _simulate_offloaded_update(streams: StreamClocks, cost: UnitCost) -> int:
    """Updates a group's state, and returns the tick at which the result is in host memory."""
    if not cost.update_in:
        return streams.run_on_host_stream("updating", cost.update, after=streams.disk)
    # Pieces are copied out while others are copied in: when the last is in, about one piece is left to copy
    # out. Gradients have left before. Contention with activations that leave meanwhile is ignored.
    into = streams.run_on_host_stream("host_in", cost.update_in, after=streams.disk)
    busy = max(cost.update, cost.update_out)
    return streams.run_on_host_stream("updating", busy, after=into + cost.update - busy)


def simulate_gradient_offload(streams: StreamClocks, cost: UnitCost, *, adds: bool) -> None:
    """Copies a reduced gradient to the host. With `adds`, it is added to the gradient there."""
    if not cost.leave:
        return
    if streams.serial:
        _stall_for_host_work(streams, cost.leave + (cost.add if adds else 0))
        return
    done = max(streams.reduce, streams.all_reduce) if cost.is_replicated else streams.reduce
    streams.run_on_host_stream("host_out", cost.leave, after=done)
    if adds:
        streams.run_on_host_stream("host_sum", cost.add, after=streams.host_out)
    streams.previous_gradient_out, streams.last_gradient_out = streams.last_gradient_out, streams.host_out


def wait_for_offloaded_gradients(streams: StreamClocks, *, norm: int) -> None:
    """Waits until all gradients are on the host, and `norm` ticks more while the host computes their norm."""
    streams.stall_compute_until(max(streams.host_out, streams.host_sum), "host")
    _stall_for_host_work(streams, norm)


def _stall_for_host_work(streams: StreamClocks, length: int) -> int:
    """Makes the compute stream wait `length` ticks for the host, and returns its clock."""
    streams.stall_compute_until(streams.compute + length, "host")
    return streams.compute
