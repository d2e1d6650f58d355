"""The explanation names what binds, and the change that gains most."""

import re

import pytest

from fullshard.planner.search.explain import PlanExplanation, explain_plan
from fullshard.planner.search.search import search
from fullshard.spec.machine.hardware import Hardware
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for


def explained(hardware: Hardware, *overrides: str, batch: int = 16) -> PlanExplanation:
    spec = decoder_spec(LLAMA_8B)
    run = run_for(LLAMA_8B, f"train.global_batch={batch}", *overrides)
    return explain_plan(search(spec, hardware, run), hardware, spec=spec, run=run)


@pytest.mark.parametrize(("scale", "limit"), [(10, "computing"), (0.01, "links")])
def test_with_enough_memory_the_limit_is_computing_or_slow_links(scale: float, limit: str):
    hardware = hardware_of(1, 8, gib=4000, scale=scale).model_copy(update={"contention": 0.0})
    assert explained(hardware).binds == limit


def test_waits_that_are_shorter_than_computing_are_named_and_do_not_bind():
    hardware = hardware_of(1, 8, gib=4000, scale=0.1).model_copy(update={"contention": 0.0})
    found = explained(hardware)
    assert found.binds == "computing"
    assert re.search(r"kernels take \d+ % of the step.*; \d+ % of the step waits for links", found.because)


def test_memory_binds_where_more_of_it_would_be_faster():
    found = explained(hardware_of(1, 8, gib=60))
    assert found.binds == "memory"
    assert re.search(r"with .* more than the .* per rank: ", found.because)


def test_the_largest_lever_is_a_pinned_setting_that_costs_most():
    """Full recompute costs a quarter of the step; nothing else that is tried gains as much."""
    run = ("recompute.mode=full", "sharding.strategy=full_shard", "train.microbatch=1")
    lever = explained(hardware_of(1, 8, gib=4000), *run).lever
    assert lever is not None
    assert lever.change == 'recompute.mode = "auto"'
    assert lever.gain > 0.1


@pytest.mark.parametrize(
    ("own", "change"),
    [
        ((), 'train.loss_chunk = "auto"'),
        (("train.loss=my:loss",), "fullshard.chunked_cross_entropy in train.loss"),
    ],
)
def test_large_loss_is_a_lever(own: tuple[str, ...], change: str):
    run = ("recompute.mode=full", "sharding.strategy=full_shard", "train.microbatch=2")
    lever = explained(hardware_of(1, 8, gib=80), *run, *own).lever
    assert lever is not None
    assert lever.change == change
    assert lever.text.startswith(f"{change}: the logits are ")


def test_no_lever_is_named_where_none_gains():
    hardware = hardware_of(1, 8, gib=4000, scale=100)
    hardware = hardware.model_copy(update={"across": None, "stragglers": 0.0})
    assert explained(hardware, batch=2048).lever is None
