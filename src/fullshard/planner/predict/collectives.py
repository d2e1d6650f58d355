"""Seconds of collectives over a mesh axis, also of ranks that share sequences or matmuls, or divide experts.

[Note: where groups lie]
Ranks are numbered node by node, and the mesh is (replicate, shard): a shard group is S consecutive ranks, a
replicate group is R ranks at distance S. A group within one node uses the link within it. Any other group
crosses nodes. NCCL then builds rings through all ranks of the group, one per NIC, each of which enters a node
at one rank and leaves it at another. With p ranks of the group in each node

    bytes_per_second = min(within, p * across)

where `across` is one rank's share of its node's NICs. If nodes have different numbers of the group's ranks,
the smallest number decides. Latency: of the n - 1 hops of a ring, m - 1 are from node to node. An all-reduce
over many nodes uses trees instead, with at most 2 * log2(m) such hops at the ring's bandwidth (NCCL since
2.4: Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4"). Groups of other axes that run at
the same time already have their own share of the NICs.

[Note: shared work]
If ranks share work, the trace is that of one rank: its activations, its share of the matmuls and of the pairs
that attention computes, and its collectives, with the bytes of the tensor of all ranks. Computing waits for
each. An all-to-all of a tensor moves as many bytes per rank as an all-gather whose result has that size; if
the rate of all-to-alls was not measured, it is assumed to take as long as this all-gather.

Left out: one all-reduce per step of the gradients of parameters that are whole on ranks which share matmuls
(norms), a few kilobytes per block.

[Note: expert parallel]
E: ranks that divide the experts of a layer, b: sequences per microbatch, s: tokens of a sequence on a rank,
k: experts per token, d: width of the model.

parameters    each rank has 1/E of the experts, sharded over the world / E ranks that have the same ones.
exchanges     k b s d values per layer, which a rank sends and receives twice in forward and twice in
              backward, and twice more if forward is recomputed; (E - 1) / E of them go to other ranks.
              Before them, one per forward of a few numbers. Computing waits for each.
              E ranks wait for the fullest of them: see [Note: uneven routing].
computing     as with E = 1, but for rows that come to the fullest rank.

[Note: uneven routing]
Routers spread tokens unevenly over experts. Of the rows of one expert, in all that E ranks exchange for one
layer, c is the standard deviation, over their mean (`ModelSpec.routing_spread`). Each rank has m experts, so
its own rows have a deviation of c / sqrt(m). In each layer, all ranks wait for the fullest of them, which has

    F = 1 + c / sqrt(m) · z(E)      times the mean

rows on average, for z(n), the expected largest of n standard normal numbers, and z(1) = 0 (Blom, "Statistical
Estimates and Transformed Beta-Variables", 1958). So work on the rows that come to experts, and the exchanges
of these rows, take F times as long as with even routing. Few experts per rank, and many ranks, make F large.

A rank that is the fullest in one layer is not in the next, so rows that are kept of many layers are about as
many as the mean. Those of the layer that computes are the most, over L layers, that any of E ranks gets:

    c / sqrt(m) · z(E L)            times the mean, in addition

with their gradients. Experts are assumed to be chosen independently of each other, and ranks to be as full in
one microbatch as in the next.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil, log2, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple, cast

from fullshard.errors import PlanError
from fullshard.spec.machine.hardware import CollectiveRate, Hardware, Link
from fullshard.spec.model import ModelSpec, TracePhase
from fullshard.spec.plan import ITEMSIZE, Plan

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class CollectiveLayout(NamedTuple):
    """Number of ranks in a collective, and their layout on nodes."""

    ranks: int
    in_node: int  # the fewest of these ranks in any of the nodes
    nodes: int


def shard_group_layout(degree: int, *, per_node: int, world_size: int, distance: int = 1) -> CollectiveLayout:
    """Returns the slowest layout on nodes of any group of `degree` ranks that are `distance` apart."""
    if distance > 1:
        return replicate_group_layout(degree, distance, per_node=per_node)
    if degree <= per_node and (per_node % degree == 0 or world_size <= per_node):
        return CollectiveLayout(degree, degree, 1)
    if degree % per_node == 0:
        return CollectiveLayout(degree, per_node, degree // per_node)
    worst = CollectiveLayout(degree, degree, 1)
    for start in range(0, min(world_size, degree * per_node), degree):
        first = min(per_node - start % per_node, degree)
        last = (start + degree - 1) % per_node + 1 if first < degree else degree
        nodes = (start + degree - 1) // per_node - start // per_node + 1
        fewest = min(first, last)
        worst = CollectiveLayout(degree, min(worst.in_node, fewest), max(worst.nodes, nodes))
    return worst


def replicate_group_layout(replicas: int, shard_degree: int, *, per_node: int) -> CollectiveLayout:
    """Returns the node layout of a group of `replicas` ranks at distance `shard_degree`."""
    if replicas * shard_degree <= per_node:
        return CollectiveLayout(replicas, replicas, 1)
    in_node = min(max(1, per_node // shard_degree), replicas)
    return CollectiveLayout(replicas, in_node, ceil(replicas / in_node))


def collective_seconds(
    kind: Collective, unsharded_bytes: float, *, group: CollectiveLayout, hardware: Hardware
) -> float:
    """Returns the seconds of a collective whose unsharded tensor has `unsharded_bytes`.

    See [Note: where groups lie]. Raises PlanError if the group crosses nodes and `hardware.across` is None.
    """
    if group.ranks <= 1:
        return 0.0
    within = _rate_of(hardware.within, kind)
    if group.nodes == 1:
        return within.predict_seconds(unsharded_bytes, group.ranks)
    across = _rate_of(_require_link_between_nodes(hardware, group), kind)
    far = group.nodes - 1
    near = group.ranks - group.nodes
    if kind == "all_reduce":
        far = min(far, 2 * ceil(log2(group.nodes)))
    moved = unsharded_bytes * (group.ranks - 1) / group.ranks
    # Each ring moves its part over `far` hops; `seconds` takes the unsharded size that moves as many bytes.
    seconds = across.predict_seconds(moved / group.in_node * (far + 1) / far, far + 1)
    if near:
        seconds = max(seconds, moved / within.bytes_per_second) + near * within.hop_seconds
    return seconds


def all_to_all_seconds(sent_bytes: float, *, group: CollectiveLayout, hardware: Hardware) -> float:
    """Returns the seconds in which each rank sends equal parts of `sent_bytes` to the ranks of a group.

    Where it was not measured, it is assumed to take as long as an all-gather whose result has this size. To
    other nodes, each rank sends (n - p) / n of its bytes over its own share of the NICs, for p of the n ranks
    in a node, with the latency of n - p messages. Raises PlanError as `collective_seconds` does.
    """
    if group.nodes == 1 or group.ranks <= 1:
        return collective_seconds("all_to_all", sent_bytes, group=group, hardware=hardware)
    across = _rate_of(_require_link_between_nodes(hardware, group), "all_to_all")
    peers = group.ranks - group.in_node
    far = sent_bytes * peers / group.ranks
    # `predict_seconds` takes the bytes of all ranks of which each but one gets a part.
    seconds = across.predict_seconds(far * (peers + 1) / peers, peers + 1)
    near = sent_bytes * (group.in_node - 1) / group.ranks
    return max(seconds, near / _rate_of(hardware.within, "all_to_all").bytes_per_second)


def _rate_of(link: Link, kind: Collective) -> CollectiveRate:
    return link.known_rates.get(kind, link.all_gather)


def _require_link_between_nodes(hardware: Hardware, group: CollectiveLayout) -> Link:
    if hardware.across is None:
        raise PlanError(
            f"{hardware.name}: what joins its nodes is not known.",
            got=f"{hardware.nodes} nodes, and a group of {group.ranks} ranks that spans {group.nodes}",
            fix="a hardware.toml with [across], or one node",
        )
    return hardware.across


def fullest_rank_row_excess(spread: float, *, ranks: int, experts_per_rank: float, layers: int = 1) -> float:
    """Returns by how much the rows of the fullest of `ranks` ranks exceed the mean, as a fraction of it.

    spread: standard deviation of one expert's rows, over their mean
    layers: number of layers among all of which the fullest rank is taken
    """
    draws = ranks * layers if ranks > 1 else 1
    largest = NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
    return spread * largest / sqrt(experts_per_rank)


def fullest_rank_rows_over_mean(spec: ModelSpec, plan: Plan) -> float:
    """Returns the rows of the fullest rank over the mean, in one layer; 1 if ranks divide no experts."""
    return 1 + _row_excess_of_plan(spec, plan)


def uneven_expert_rows_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Returns the bytes of rows, and of their gradients, that the fullest rank has beyond the mean.

    Each row of a layer is counted as input and as output of each matrix of its expert, and once more each for
    the gradients. See [Note: uneven routing].
    """
    experts = [unit for unit in spec.units if unit.has_experts]
    excess = _row_excess_of_plan(spec, plan, layers=len(experts))
    if not excess:
        return 0
    size = plan.microbatch
    rows = max(kernel.rows.value_at(size) * kernel.pieces.value_at(size) for kernel in spec.kernels)
    widths = max(sum(sum(p.shape[1:]) for p in unit.parameters if len(p.shape) == 3) for unit in experts)
    return round(excess * 2 * rows * widths * ITEMSIZE[plan.precision.param])


def _row_excess_of_plan(spec: ModelSpec, plan: Plan, *, layers: int = 1) -> float:
    ranks = plan.expert_parallel
    if ranks == 1:
        return 0.0
    share = spec.expert_count_gcd / ranks
    return fullest_rank_row_excess(spec.routing_spread, ranks=ranks, experts_per_rank=share, layers=layers)


def model_parallel_seconds(
    spec: ModelSpec, phases: Sequence[TracePhase], *, plan: Plan, hardware: Hardware
) -> tuple[float, ...]:
    """Returns the seconds of the collectives among ranks that share work, in each phase."""
    per_node, tensor, context = hardware.ranks_per_node, plan.tensor_parallel, plan.context_parallel

    layout = partial(shard_group_layout, per_node=per_node, world_size=plan.world_size)
    experts = layout(plan.expert_parallel)
    groups = {"tensor": layout(tensor), "context": layout(context, distance=tensor), "expert": experts}
    received = fullest_rank_rows_over_mean(spec, plan)

    def seconds(kernel_index: int) -> float:
        kernel = spec.kernels[kernel_index]
        if kernel.axis is None:
            return 0.0
        size, group = kernel.bytes.value_at(plan.microbatch), groups[kernel.axis]
        if kernel.kind == "row_exchange":
            return all_to_all_seconds(received * size, group=group, hardware=hardware)
        return collective_seconds(cast(Collective, kernel.kind), size, group=group, hardware=hardware)

    return tuple(sum(times * seconds(index) for index, times in phase.work) for phase in phases)


def device_context_bytes(plan: Plan, hardware: Hardware) -> int:
    """Returns the device memory that a rank's process takes outside the allocator.

    The group of all ranks has a communicator, and each axis with other groups has one. All-to-alls, of rows
    of experts and of gradients that [communication] sums, take further memory for each peer.
    """
    world = plan.world_size
    if world == 1:
        return hardware.context_bytes
    data = [plan.replicate_degree, plan.shard_degree]
    if plan.expert_parallel > 1:
        data += plan.expert_degrees(is_sharded=True)
    shared = (plan.tensor_parallel, plan.context_parallel, plan.expert_parallel)
    count = 1 + sum(1 < ranks < world for ranks in data) + sum(ranks > 1 for ranks in shared)
    peers = min(plan.expert_parallel, hardware.ranks_per_node) - 1
    if plan.run.communication.changes_sums:
        peers += min(plan.shard_degree, max(1, hardware.ranks_per_node // plan.tensor_parallel)) - 1
    return hardware.context_bytes + count * hardware.communicator_bytes + peers * hardware.peer_bytes
