"""Sensitivity: more of what binds gains, by no more than it is, and more of the rest gains nothing."""

import pytest

from fullshard.planner.search import plan
from fullshard.planner.sensitivity import MORE, better_hardware, plan_sensitivity
from fullshard.spec.hardware import Hardware
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

PINS = ("sharding.strategy=full_shard", "train.microbatch=1", "recompute.mode=none", "prefetch.mode=implicit")


def gains(hardware: Hardware, *pins: str) -> dict[str, float]:
    spec = decoder_spec(LLAMA_8B)
    run = run_for(LLAMA_8B, f"train.global_batch={hardware.world_size}", *pins)
    best = plan(spec, hardware, run)
    return {line.name: line.gain for line in plan_sensitivity(best, spec, hardware=hardware, run=run)}


@pytest.mark.parametrize(
    ("scale", "nodes", "largest"),
    [(100, 1, "matmul rate"), (0.01, 1, "links in a node"), (0.1, 2, "network")],
)
def test_what_binds_gains_most_and_nothing_gains_more_than_it_is(scale: float, nodes: int, largest: str):
    found = gains(hardware_of(nodes, 8, gib=400, scale=scale), *PINS)
    assert max(found, key=lambda name: found[name]) == largest
    assert all(-1e-6 <= gain <= MORE + 1e-6 for gain in found.values())


def test_more_memory_gains_only_where_a_faster_plan_begins_to_fit():
    assert gains(hardware_of(1, 8, gib=4000))["memory"] == 0
    found = [gains(hardware_of(1, 8, gib=gib))["memory"] for gib in range(40, 80, 8)]
    assert max(found) > 0


def test_a_property_that_the_machine_does_not_have_is_left_out():
    assert set(better_hardware(hardware_of(1, 1))) == {"memory", "matmul rate", "memory bandwidth", "host"}
    assert "network" in better_hardware(hardware_of(2, 8))
