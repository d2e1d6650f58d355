"""Seconds of a collective over one mesh axis.

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
"""

from math import ceil, log2
from typing import Literal, NamedTuple

from fullshard.errors import PlanError
from fullshard.spec.machine.hardware import CollectiveRate, Hardware, Link

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class CollectiveLayout(NamedTuple):
    """Number of ranks in a collective, and their layout on nodes."""

    ranks: int
    in_node: int  # the fewest of these ranks in any of the nodes
    nodes: int


def shard_group_layout(degree: int, *, per_node: int, world_size: int) -> CollectiveLayout:
    """Returns the slowest node layout among all groups of `degree` consecutive ranks."""
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
    kind: Collective, count: float, *, group: CollectiveLayout, hardware: Hardware
) -> float:
    """Returns the seconds of a collective whose unsharded tensor has `count` bytes.

    See [Note: where groups lie]. Raises PlanError if the group crosses nodes and `hardware.across` is None.
    """
    if group.ranks <= 1:
        return 0.0
    within = _rate_of(hardware.within, kind)
    if group.nodes == 1:
        return within.predict_seconds(count, group.ranks)
    across = _rate_of(_require_link_between_nodes(hardware, group), kind)
    far = group.nodes - 1
    near = group.ranks - group.nodes
    if kind == "all_reduce":
        far = min(far, 2 * ceil(log2(group.nodes)))
    moved = count * (group.ranks - 1) / group.ranks
    # Each ring moves its part over `far` hops; `seconds` takes the unsharded size that moves as many bytes.
    seconds = across.predict_seconds(moved / group.in_node * (far + 1) / far, far + 1)
    if near:
        seconds = max(seconds, moved / within.bytes_per_second) + near * within.hop_seconds
    return seconds


def all_to_all_seconds(count: float, *, group: CollectiveLayout, hardware: Hardware) -> float:
    """Returns the seconds in which each rank sends equal parts of `count` bytes to the ranks of a group.

    Where it was not measured, it is assumed to take as long as an all-gather whose result has this size. To
    other nodes, each rank sends (n - p) / n of its bytes over its own share of the NICs, for p of the n ranks
    in a node, with the latency of n - p messages. Raises PlanError as `collective_seconds` does.
    """
    if group.nodes == 1 or group.ranks <= 1:
        return collective_seconds("all_to_all", count, group=group, hardware=hardware)
    across = _rate_of(_require_link_between_nodes(hardware, group), "all_to_all")
    peers = group.ranks - group.in_node
    far = count * peers / group.ranks
    # `predict_seconds` takes the bytes of all ranks of which each but one gets a part.
    seconds = across.predict_seconds(far * (peers + 1) / peers, peers + 1)
    near = count * (group.in_node - 1) / group.ranks
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
