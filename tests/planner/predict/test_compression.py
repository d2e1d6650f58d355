"""Bytes and seconds of [communication], planned."""

from typing import Any, cast

import pytest

from fullshard.planner.predict.compression import reduce_wires
from fullshard.planner.predict.memory import bytes_by_unit_kind
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import predict, search
from fullshard.spec.run import Run
from fullshard.spec.settings.communication_section import CommunicationSection, wire_bytes
from tests.fakes.hardware import cpu_of
from tests.planner.measured import described, hardware_of_one_byte_per_second, plan_of

BOTH = ("communication.gather=int8", "communication.reduce=int8")
FULL = "sharding.strategy=full_shard"


def seconds_of(*more: str, ranks: int = 4) -> tuple[float, float]:
    """Seconds of gathers and of reductions, which are bytes on this hardware."""
    plan = plan_of(ranks, FULL, *more)
    time = require_prediction(predict(described(plan), plan, hardware_of_one_byte_per_second(ranks))).time
    return time.exposed_all_gather, time.exposed_reduce_scatter


def test_int8_takes_a_quarter_of_the_seconds_of_fp32() -> None:
    (gather, reduce), (plain_gather, plain_reduce) = seconds_of(*BOTH), seconds_of()
    assert gather / plain_gather == pytest.approx(0.254, abs=0.002)
    assert reduce / plain_reduce == pytest.approx(0.254, abs=0.002)


def test_only_what_is_compressed_changes() -> None:
    plain = seconds_of()
    for number, setting in enumerate(BOTH):
        found = seconds_of(setting)
        assert found[number] < 0.3 * plain[number]
        assert found[1 - number] == pytest.approx(plain[1 - number])


def test_a_hook_is_planned_with_its_own_bytes() -> None:
    own = seconds_of("communication.hook=tests.parallel.hooks:ErrorFeedback")
    plain = seconds_of()
    assert own[0] == pytest.approx(plain[0])  # it has no gather
    assert own[1] / plain[1] == pytest.approx(1 / 32, rel=0.01)


def test_wires_are_of_padded_shards() -> None:
    plan = plan_of(3, FULL, *BOTH)
    for size in bytes_by_unit_kind(described(plan), plan).values():
        if size.gather_wires is not None:
            assert size.gather_wires.sent == 3 * wire_bytes("int8", size.gathered // 12)


@pytest.mark.parametrize(("within", "itemsize"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("near", [2, 4])
def test_each_level_takes_the_seconds_of_its_bytes(within: str, itemsize: int, near: int) -> None:
    """Checks that each rank sends (P - 1) / P of its gradients within its node, and a sum to each other."""
    levels = ("communication.reduce=int8", f"communication.reduce_within={within}")
    plan = plan_of(8, FULL, *levels)
    hardware = hardware_of_one_byte_per_second(8)
    free = hardware.within.model_copy(update={"all_gather": hardware.within.all_reduce})
    laid_out = hardware.with_rank_counts(nodes=8 // near, ranks_per_node=near)
    slow_node = laid_out.model_copy(update={"across": free})
    slow_network = laid_out.model_copy(update={"within": free, "across": hardware.within})
    own, seconds = plan, list[float]()
    for machine in (slow_node, slow_network):
        own = predict(described(plan), plan, machine)
        seconds.append(require_prediction(own).time.exposed_reduce_scatter)
    spec = described(plan)
    sizes = bytes_by_unit_kind(spec, own)
    shards = [sizes[kind].reduce_input // (8 * 4) for kind in spec.first_identical_unit_indices]
    assert seconds[0] == pytest.approx(sum((near - 1) * (8 // near) * itemsize * n for n in shards), rel=1e-3)
    assert seconds[1] == pytest.approx(
        sum((8 // near - 1) * wire_bytes("int8", n) for n in shards if n), rel=1e-3
    )


def test_sums_that_stay_on_one_level_are_planned_as_they_are_sent() -> None:
    """Checks that one node sends no int8, and nodes of one rank no fp32 if the reduction is in bf16."""
    levels = CommunicationSection(reduce="int8", reduce_within="fp32")
    plain = CommunicationSection(reduce_within="fp32")
    assert reduce_wires(levels, 1000, ranks=4, near=4, dtype="fp32") == reduce_wires(
        plain, 1000, ranks=4, near=4, dtype="fp32"
    )
    for near, dtype, sent in ((4, "fp32", 4000), (4, "bf16", 4000), (1, "fp32", 16000), (1, "bf16", 8000)):
        wires = reduce_wires(plain, 1000, ranks=4, near=near, dtype=cast(Any, dtype))
        assert wires is not None
        assert wires.sent == sent


def test_nodes_are_those_of_the_hardware_that_is_planned_on() -> None:
    plan = plan_of(8, FULL, "communication.reduce=int8", "communication.reduce_within=fp32")
    hardware = cpu_of(8).with_rank_counts(nodes=2, ranks_per_node=4)
    hardware = hardware.model_copy(update={"across": hardware.within})
    found = search(described(plan), hardware, plan.run).best
    assert found is not None
    assert found.run.communication.ranks_per_node == 4
    kinds = bytes_by_unit_kind(described(plan), found).values()
    assert {size.reduce_wires.near for size in kinds if size.reduce_wires is not None} == {4}


def test_a_search_shards_if_communication_is_compressed() -> None:
    plan = plan_of(2, *BOTH)
    run = plan.run.with_overrides(["sharding.strategy=auto"])
    found = search(described(plan), cpu_of(2), run).best
    assert found is not None
    assert found.strategy != "no_shard"


def test_nothing_is_compressed_by_default() -> None:
    assert not Run().communication.is_set
