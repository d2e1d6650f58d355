"""Which link a group of ranks uses, and how fast a ring through it is."""

import pytest

from fullshard.errors import PlanError
from fullshard.planner.predict.collectives import (
    CollectiveLayout,
    collective_seconds,
    device_context_bytes,
    replicate_group_layout,
    shard_group_layout,
)
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.hardware import hardware_of


@pytest.mark.parametrize(
    ("degree", "group"),
    [
        (1, CollectiveLayout(1, 1, 1)),
        (4, CollectiveLayout(4, 4, 1)),
        (8, CollectiveLayout(8, 8, 1)),
        (32, CollectiveLayout(32, 8, 4)),
        (6, CollectiveLayout(6, 2, 2)),
    ],
)
def test_shard_groups_are_ranks_in_a_row(degree: int, group: CollectiveLayout):
    assert shard_group_layout(degree, per_node=8, world_size=96) == group


@pytest.mark.parametrize(
    ("replicas", "shard", "group"),
    [
        (4, 2, CollectiveLayout(4, 4, 1)),
        (4, 8, CollectiveLayout(4, 1, 4)),
        (16, 2, CollectiveLayout(16, 4, 4)),
        (2, 64, CollectiveLayout(2, 1, 2)),
    ],
)
def test_replicate_groups_lie_across_shard_groups(replicas: int, shard: int, group: CollectiveLayout):
    assert replicate_group_layout(replicas, shard, per_node=8) == group


def test_a_group_in_one_node_uses_the_link_within_it():
    hardware = hardware_of(4, 8)
    found = collective_seconds("all_gather", 1e9, group=CollectiveLayout(8, 8, 1), hardware=hardware)
    assert found == hardware.within.all_gather.predict_seconds(1e9, 8)
    assert collective_seconds("all_gather", 1e9, group=CollectiveLayout(1, 1, 1), hardware=hardware) == 0


def test_a_ring_over_nodes_has_the_nics_of_its_ranks_and_no_more_than_the_link_within():
    hardware, count = hardware_of(4, 8), 1e12
    across, within = 50e9 * 0.8, 450e9 * 0.8
    for in_node, speed in ((1, across), (4, 4 * across), (8, 8 * across), (16, within)):
        ranks = 4 * in_node
        found = collective_seconds(
            "all_gather", count, group=CollectiveLayout(ranks, in_node, 4), hardware=hardware
        )
        assert found == pytest.approx(count * (ranks - 1) / ranks / speed, rel=1e-3)


def test_a_ring_waits_for_every_node_and_a_tree_only_for_its_height():
    hardware = hardware_of(1024, 8)
    group = CollectiveLayout(1024, 1, 1024)
    ring = collective_seconds("all_gather", 1, group=group, hardware=hardware)
    tree = collective_seconds("all_reduce", 1, group=group, hardware=hardware)
    assert ring == pytest.approx(2e-5 + 1023 * 5e-6, rel=1e-3)
    assert tree == pytest.approx(2e-5 + 20 * 5e-6, rel=1e-3)


def test_nodes_that_nothing_joins_are_refused():
    alone = hardware_of(2, 8).model_copy(update={"across": None})
    with pytest.raises(PlanError, match="joins its nodes"):
        collective_seconds("all_gather", 1, group=CollectiveLayout(16, 8, 2), hardware=alone)


@pytest.mark.parametrize(
    ("ranks", "settings", "communicators", "peers"),
    [
        (1, "full_shard", 0, 0),
        (16, "full_shard", 1, 0),
        (16, "hybrid_shard sharding.shard_degree=8", 3, 0),  # that of all ranks, and one for each axis
        (16, "full_shard sharding.tensor_parallel=4", 3, 0),
        (16, "full_shard sharding.context_parallel=2", 2, 0),
        (16, "full_shard sharding.expert_parallel=4", 3, 3),
        (16, "full_shard sharding.expert_parallel=16", 2, 7),  # peers of one node
    ],
)
def test_a_process_takes_memory_for_each_communicator_and_each_peer_of_all_to_alls(
    ranks: int, settings: str, communicators: int, peers: int
):
    overrides = [f"sharding.strategy={settings.split()[0]}", *settings.split()[1:], "train.global_batch=16"]
    if "expert" in settings:
        overrides += ["model.experts=16", "model.experts_per_token=2"]
    plan = Plan.from_run(Run.load(overrides=overrides), world_size=ranks)
    hardware = hardware_of(2, 8).model_copy(
        update={"context_bytes": 10**12, "communicator_bytes": 10**6, "peer_bytes": 1}
    )
    assert device_context_bytes(plan, hardware) == 10**12 + communicators * 10**6 + peers
