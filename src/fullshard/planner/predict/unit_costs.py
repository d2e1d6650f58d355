"""Costs of FSDP2's events on one unit: collectives, and the copies in and out of their buffers.

Times are whole picoseconds (`TICKS` per second). Their sums are exact, so a simulation can detect that its
state repeats.
"""

from dataclasses import dataclass

from fullshard.planner.predict.collectives import (
    CollectiveLayout,
    collective_seconds,
    replicate_group_layout,
    shard_group_layout,
)
from fullshard.planner.predict.roofline import memory_seconds
from fullshard.planner.predict.unit_bytes import UnitBytes
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
    resharded: bool  # it is resharded to fewer ranks (hpZ)
    separate_network: bool  # hpZ's all-gathers use other links, and overlap the shard axis's collectives
    shares_wires: bool  # the all-reduce uses the same links as the shard axis
    copy_in: int  # own shard cast and copied into the all-gather buffer
    gather: int  # the all-gather
    copy_out: int  # parameters copied out of the buffer
    again_in: int  # `copy_in` in backward, which may be over fewer ranks
    backward_gather: int  # `gather` in backward
    hpz_copy: int  # copy of the part kept over fewer ranks after forward
    pack: int  # gradients copied into the reduce-scatter buffer
    scatter: int  # the reduce-scatter; over one rank, a copy
    cast_gradient: int  # the reduced chunk cast to the master dtype
    settle_again: int  # the reduced chunk cast, and added to an earlier gradient
    add_partial: int  # a chunk not yet reduced over replicas, added to an earlier one
    all_reduce: int  # over replicas
    keep_unsynced: int  # unsharded gradients cast to the reduce dtype, without sync
    keep_again: int  # unsharded gradients cast and added to earlier ones, without sync
    # Costs of an offload target: see [Note: tiers] in `planner.offload`.
    leave: int = 0  # the reduced chunk copied to the host
    add: int = 0  # the chunk added to an earlier one on the host
    update_disk: int = 0  # the group's state read from the drive and written
    update_in: int = 0  # state and gradients copied in for an update on the device
    update: int = 0  # the update
    update_out: int = 0  # state copied out after an update on the device
    back: int = 0  # updated parameters copied to the device
    fetch_disk: int = 0  # the own shard read from the drive before an all-gather
    fetch: int = 0  # the own shard copied from the host before an all-gather
    shards_on_disk: int = 0  # bytes of the own shard on the drive
    fetch_frozen: int = 0  # the frozen shard read from the drive
    frozen_on_disk: int = 0  # bytes of the frozen shard on the drive


def unit_cost(size: UnitBytes, hardware: Hardware, *, world_size: int, tensor: int = 1) -> UnitCost:
    """Returns the costs of one unit, from the bytes that torch's `_fsdp_collectives` moves per event.

    tensor: consecutive ranks with the same sequences; a shard group takes every `tensor`-th rank.
    """
    shard, replicate, fewer = _group_layouts(size, hardware, world_size=world_size, tensor=tensor)

    def traffic_ticks(*counts: int) -> int:
        return to_ticks(memory_seconds(sum(counts), hardware.rates.memory))

    part = size.gathered // size.shard_degree
    sharded, hpz = size.shard_degree > 1, size.reshard_degree > 1
    cast_in = size.shards + size.cast_copy if size.cast_copy and size.shards else 0
    cast_in += 16 * size.in_fp8  # scaled and limited in fp32, before the cast
    into = traffic_ticks(cast_in, 2 * part) if sharded else 0
    again_in = traffic_ticks(4 * size.gathered // size.reshard_degree) if hpz else into
    gather = to_ticks(collective_seconds("all_gather", size.gathered, group=shard, hardware=hardware))
    again = to_ticks(collective_seconds("all_gather", size.gathered, group=fewer, hardware=hardware))
    reduced, chunk, gradient = size.reduce_input, size.reduce_output, size.gradient
    scatter = to_ticks(collective_seconds("reduce_scatter", reduced, group=shard, hardware=hardware))
    cast_out = (chunk, gradient) if gradient != chunk else ()
    same = size.whole == size.whole_reduced
    # Over one rank, shards are cast one by one and then copied.
    copy_out = traffic_ticks(0 if sharded else cast_in, 2 * size.gathered + 2 * size.unpacking)
    pack = traffic_ticks(size.whole, reduced)
    pack += traffic_ticks(2 * size.unpacking) if size.trained_parameters else 0
    summed = collective_seconds("all_reduce", chunk, group=replicate, hardware=hardware)
    return UnitCost(
        has_parameters=size.gathered > 0,
        is_trained=reduced > 0,
        is_sharded=sharded,
        is_replicated=size.replicate_degree > 1,
        reshards=size.reshards,
        gathers_in_backward=size.gathers_in_backward,
        resharded=hpz,
        separate_network=hpz and (fewer.nodes > 1) != (shard.nodes > 1),
        shares_wires=sharded and (replicate.nodes > 1) == (shard.nodes > 1),
        copy_in=into,
        gather=gather,
        copy_out=copy_out,
        again_in=again_in,
        backward_gather=again if hpz else gather,
        hpz_copy=traffic_ticks(2 * size.gathered // size.reshard_degree) if hpz else 0,
        pack=pack,
        scatter=scatter if sharded else traffic_ticks(2 * reduced),
        cast_gradient=traffic_ticks(*cast_out),
        settle_again=traffic_ticks(*cast_out, 3 * gradient),
        add_partial=traffic_ticks(3 * chunk),
        all_reduce=to_ticks(summed),
        keep_unsynced=0 if same else traffic_ticks(size.whole, size.whole_reduced),
        keep_again=0 if same else traffic_ticks(size.whole, 2 * size.whole_reduced),
    )


def to_ticks(seconds: float) -> int:
    """Returns `seconds` as whole picoseconds."""
    return round(seconds * TICKS)


def _group_layouts(
    size: UnitBytes, hardware: Hardware, *, world_size: int, tensor: int
) -> tuple[CollectiveLayout, CollectiveLayout, CollectiveLayout]:
    per_node, degree = hardware.ranks_per_node, size.shard_degree
    if tensor > 1:
        return (
            replicate_group_layout(degree, tensor, per_node=per_node),
            replicate_group_layout(size.replicate_degree, degree * tensor, per_node=per_node),
            replicate_group_layout(size.reshard_degree, tensor, per_node=per_node),
        )
    return (
        shard_group_layout(degree, per_node=per_node, world_size=world_size),
        replicate_group_layout(size.replicate_degree, degree, per_node=per_node),
        shard_group_layout(size.reshard_degree, per_node=per_node, world_size=world_size),
    )
