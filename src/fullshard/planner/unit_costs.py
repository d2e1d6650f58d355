"""What the engine's acts on one unit take: collectives, and the copies in and out of their buffers.

Times are whole picoseconds (`TICKS` a second): sums of them are exact, so that a simulation whose state
repeats can be seen to repeat.
"""

from dataclasses import dataclass

from fullshard.planner.collectives import CollectiveGroup, collective_seconds, replicate_group, shard_group
from fullshard.planner.roofline import memory_seconds
from fullshard.planner.unit_bytes import UnitBytes
from fullshard.spec.hardware import Hardware

TICKS = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Ticks of the acts on one unit, and what of it decides which acts there are.

    copy_in, gather, copy_out   the all-gather: own shard cast and laid into the buffer, sent, laid out
    again_in, again             the same for backward's, which may be over fewer ranks; `apart`: over other
                                wires, so that it passes beside the shard axis's collectives
    put_back                    own part of what is kept over fewer ranks after forward
    pack, scatter               gradients laid into the buffer, the reduce-scatter (or, over one rank, a copy)
    settle, settle_again        the reduced chunk cast to the master dtype; and added to an earlier one
    add_partial                 a chunk that is not reduced over replicas yet, added to an earlier one
    all_reduce                  over replicas; `shares_wires`: with the shard axis
    keep, keep_again            whole gradients that stay, in the dtype that they are reduced in

    Of a tier (see [Note: tiers] in `planner.offload`):
    leave, add                  the reduced chunk to the host; and added there to an earlier one
    update_disk, update, back   the group's state read and written, its update, its parameters to the device
    update_in, update_out       with an update there: state and gradients to the device, and state from it
    fetch_disk, fetch           the own shard from the drive, and from the host, before an all-gather;
                                `shards_on_disk`: its bytes, if it is there
    fetch_frozen                what of it is frozen from the drive; `frozen_on_disk`: its bytes
    """

    has_parameters: bool
    is_trained: bool
    is_sharded: bool
    is_replicated: bool
    reshards: bool
    resharded: bool
    separate_network: bool
    shares_wires: bool
    copy_in: int
    gather: int
    copy_out: int
    again_in: int
    backward_gather: int
    hpz_copy: int
    pack: int
    scatter: int
    cast_gradient: int
    settle_again: int
    add_partial: int
    all_reduce: int
    keep_unsynced: int
    keep_again: int
    leave: int = 0
    add: int = 0
    update_disk: int = 0
    update_in: int = 0
    update: int = 0
    update_out: int = 0
    back: int = 0
    fetch_disk: int = 0
    fetch: int = 0
    shards_on_disk: int = 0
    fetch_frozen: int = 0
    frozen_on_disk: int = 0


def unit_cost(size: UnitBytes, hardware: Hardware, *, world_size: int, tensor: int = 1) -> UnitCost:
    """The costs of one unit from its sizes. What each act reads and writes: `_fsdp_collectives` of torch.

    `tensor`: so many ranks in a row have parts of the same sequences, and of one shard group every
    `tensor`-th.
    """
    shard, replicate, fewer = _groups(size, hardware, world_size=world_size, tensor=tensor)

    def moved(*counts: int) -> int:
        return ticks(memory_seconds(sum(counts), hardware.rates.memory))

    part = size.gathered // size.shard_degree
    sharded, hpz = size.shard_degree > 1, size.reshard_degree > 1
    cast_in = size.shards + size.cast_copy if size.cast_copy and size.shards else 0
    into = moved(cast_in, 2 * part) if sharded else 0
    again_in = moved(4 * size.gathered // size.reshard_degree) if hpz else into
    gather = ticks(collective_seconds("all_gather", size.gathered, group=shard, hardware=hardware))
    again = ticks(collective_seconds("all_gather", size.gathered, group=fewer, hardware=hardware))
    reduced, chunk, gradient = size.reduce_input, size.reduce_output, size.gradient
    scatter = ticks(collective_seconds("reduce_scatter", reduced, group=shard, hardware=hardware))
    cast_out = (chunk, gradient) if gradient != chunk else ()
    same = size.whole == size.whole_reduced
    return UnitCost(
        has_parameters=size.gathered > 0,
        is_trained=reduced > 0,
        is_sharded=sharded,
        is_replicated=size.replicate_degree > 1,
        reshards=size.reshards,
        resharded=hpz,
        separate_network=hpz and (fewer.nodes > 1) != (shard.nodes > 1),
        shares_wires=sharded and (replicate.nodes > 1) == (shard.nodes > 1),
        copy_in=into,
        gather=gather,
        # Over one rank, shards are cast one by one, and copied.
        copy_out=moved(2 * size.gathered) if sharded else moved(cast_in, 2 * size.gathered),
        again_in=again_in,
        backward_gather=again if hpz else gather,
        hpz_copy=moved(2 * size.gathered // size.reshard_degree) if hpz else 0,
        pack=moved(size.whole, reduced),
        scatter=scatter if sharded else moved(2 * reduced),
        cast_gradient=moved(*cast_out),
        settle_again=moved(*cast_out, 3 * gradient),
        add_partial=moved(3 * chunk),
        all_reduce=ticks(collective_seconds("all_reduce", chunk, group=replicate, hardware=hardware)),
        keep_unsynced=0 if same else moved(size.whole, size.whole_reduced),
        keep_again=0 if same else moved(size.whole, 2 * size.whole_reduced),
    )


def ticks(seconds: float) -> int:
    """Whole picoseconds."""
    return round(seconds * TICKS)


def _groups(
    size: UnitBytes, hardware: Hardware, *, world_size: int, tensor: int
) -> tuple[CollectiveGroup, CollectiveGroup, CollectiveGroup]:
    per_node, degree = hardware.ranks_per_node, size.shard_degree
    if tensor > 1:
        return (
            replicate_group(degree, tensor, per_node=per_node),
            replicate_group(size.replicate_degree, degree * tensor, per_node=per_node),
            replicate_group(size.reshard_degree, tensor, per_node=per_node),
        )
    return (
        shard_group(degree, per_node=per_node, world_size=world_size),
        replicate_group(size.replicate_degree, degree, per_node=per_node),
        shard_group(size.reshard_degree, per_node=per_node, world_size=world_size),
    )
