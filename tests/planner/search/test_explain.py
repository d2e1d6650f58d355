"""The explanation names what binds, and the change that gains most."""

import re

import pytest

from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.explain import NOTABLE, PlanExplanation, explain_plan, iterate_changes
from fullshard.planner.search.search import search
from fullshard.spec.machine.hardware import MOST_RANKS, Hardware
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, LLAMA_405B, MODES, Shape, decoder_spec, run_for


def explained(hardware: Hardware, *overrides: str, batch: int = 16) -> PlanExplanation:
    spec = decoder_spec(LLAMA_8B)
    run = run_for(LLAMA_8B, f"train.global_batch={batch}", *overrides)
    return explain_plan(search(spec, hardware, run), hardware, spec=spec, run=run)


@pytest.mark.parametrize(("scale", "cost"), [(10, "computing"), (0.1, "links"), (0.01, "links")])
def test_slow_links_are_the_largest_cost_where_memory_is_enough(scale: float, cost: str):
    hardware = hardware_of(1, 8, gib=4000, scale=scale).model_copy(update={"contention": 0.0})
    found = explained(hardware)
    assert found.binds == cost
    words = (
        "largest cost that can be removed: communication, "
        if cost == "links"
        else "links and the host cost less than 3 % each, twice the memory gains less"
    )
    assert re.match(rf"kernels take \d+ % of the step( .*)?; {words}", found.because)


def test_the_cost_that_is_named_is_the_largest():
    """Shares of a step that no line of the reasons may contradict: communication beside memory."""
    for gib, scale in [(60, 1), (60, 0.3), (80, 0.1), (4000, 0.1), (4000, 1)]:
        hardware, spec = hardware_of(1, 8, gib=gib, scale=scale), decoder_spec(LLAMA_8B)
        run = run_for(LLAMA_8B, "train.global_batch=16")
        found = search(spec, hardware, run)
        assert found.best is not None
        time = require_prediction(found.best).time
        own, other = found.best, found.best_in_twice or found.best
        speeds = [require_prediction(plan).tokens_per_second for plan in (own, other)]
        links = time.contention + time.exposed_all_gather + time.exposed_reduce_scatter
        costs = {
            "links": (links + time.exposed_all_reduce) / time.total,
            "host": time.launch_gaps / time.total,
        }
        costs |= {"memory": 1 - speeds[0] / speeds[1], "computing": NOTABLE}
        said = explain_plan(found, hardware, spec=spec, run=run)
        assert said.binds == max(costs, key=lambda name: costs[name])


def test_no_more_ranks_are_tried_than_hardware_may_have():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, f"train.global_batch={MOST_RANKS}")
    for nodes in (MOST_RANKS // 16, MOST_RANKS // 8):
        hardware = hardware_of(nodes, 8, gib=4000)
        best = search(spec, hardware, run).best
        assert best is not None
        tried = [other.world_size for _, _, other in iterate_changes(best, hardware, run=run)]
        assert max(tried) == MOST_RANKS


def test_a_slow_host_is_the_largest_cost_beside_quick_kernels():
    hardware = hardware_of(1, 8, gib=4000)
    rates = hardware.rates.model_copy(update={"launch_seconds": 0.1})
    found = explained(hardware.model_copy(update={"rates": rates}))
    assert found.binds == "host"
    assert "waiting for the host to launch kernels" in found.because


def test_memory_that_is_missing_names_its_size_and_what_it_would_change():
    hardware, spec = hardware_of(1, 8, gib=60), decoder_spec(LLAMA_8B)
    run = run_for(LLAMA_8B, "train.global_batch=16")
    found = search(spec, hardware, run)
    assert found.best is not None
    assert found.best_in_twice is not None
    said = explain_plan(found, hardware, spec=spec, run=run)
    assert said.binds == "memory"
    text = re.search(
        r"memory. With ([\d.]+) GiB more per rank, .* (\d+) % faster: .* instead of ", said.because
    )
    assert text is not None, said.because
    own, faster = map(require_prediction, (found.best, found.best_in_twice))
    larger = own.capacity_bytes + float(text[1]) * 2**30
    assert 0.95 * larger == pytest.approx(faster.required_device_bytes, rel=1e-3), "with the margin left free"
    assert float(text[2]) == pytest.approx(
        100 * faster.tokens_per_second / own.tokens_per_second - 100, abs=0.5
    )


@pytest.mark.parametrize("gib", [24, 32, 40])
def test_the_planner_is_as_fast_as_stated_with_the_memory_that_is_missing(gib: int):
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=128")
    hardware = hardware_of(1, 8, gib=gib).model_copy(update={"host_bytes_per_second": 5e10})
    found = search(spec, hardware, run)
    said = explain_plan(found, hardware, spec=spec, run=run)
    pattern = r'With ([\d.]+) GiB more per rank(?: and offload.tier = "(.+)")?, .* (\d+) % faster'
    named = re.search(pattern, said.because)
    assert named is not None, said.because
    own = require_prediction(found.best or found.fastest)
    more = own.capacity_bytes + round((float(named[1]) + 0.01) * 2**30)
    pinned = run_for(LLAMA_8B, "train.global_batch=128", f"offload.tier={named[2] or 'auto'}")
    again = search(spec, hardware, pinned, capacity_bytes=more).best
    assert again is not None
    gain = require_prediction(again).tokens_per_second / own.tokens_per_second - 1
    assert gain > int(named[3]) / 100 - 0.015


def test_the_largest_lever_is_a_pinned_setting_that_costs_most():
    """Full recompute costs a quarter of the step; nothing else that is tried gains as much."""
    run = ("recompute.mode=full", "sharding.strategy=full_shard", "train.microbatch=1")
    lever = explained(hardware_of(1, 8, gib=4000), *run).lever
    assert lever is not None
    assert lever.change == 'recompute.mode = "auto"'
    assert lever.gain > 0.1


def test_a_pinned_recompute_is_tried_with_the_spec_of_the_open_run():
    """A run that pins its mode is traced in this mode alone."""
    hardware, pinned = hardware_of(1, 8, gib=4000), ("recompute.mode=full", "train.global_batch=16")
    spec, run = decoder_spec(LLAMA_8B, modes=MODES[1:2]), run_for(LLAMA_8B, *pinned)
    found = search(spec, hardware, run)
    said = explain_plan(found, hardware, spec=spec, run=run, describe=lambda _: decoder_spec(LLAMA_8B))
    assert said.lever is not None
    assert said.lever.change == 'recompute.mode = "auto"'
    assert "recompute none instead of full" in said.lever.text


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


GATHER, REDUCE = 'communication.gather = "int8"', 'communication.reduce = "int8"'
LEVELS = f'{REDUCE} and communication.reduce_within = "bf16"'


@pytest.mark.parametrize(
    ("shape", "nodes", "links", "more", "change"),
    [  # links: the bandwidth within nodes and between them, as parts of quick ones
        (LLAMA_8B, 1, (0.03, 1), (), REDUCE),
        (LLAMA_8B, 4, (0.03, 0.03), ("communication.reduce=bf16",), GATHER),
        (LLAMA_8B, 4, (1, 0.03), (), LEVELS),
        (LLAMA_8B, 4, (1, 0.03), ("communication.gather=int8",), LEVELS),
        (LLAMA_405B, 2, (1, 0.03), (), LEVELS),  # replicas, which become shards
        (LLAMA_405B, 4, (1, 1), (), None),
    ],
)
def test_a_plan_with_the_proposed_compression_is_as_fast_as_stated(
    shape: Shape, nodes: int, links: tuple[float, float], more: tuple[str, ...], change: str | None
):
    machines = [hardware_of(nodes, 8, gib=4000, scale=scale) for scale in links]
    hardware = machines[0].model_copy(update={"across": machines[1].across})
    spec, run = decoder_spec(shape), run_for(shape, "train.global_batch=64", *more)
    found = search(spec, hardware, run)
    assert found.best is not None
    assert found.best.run.communication == run.communication, "no search chooses it"
    explanation = explain_plan(found, hardware, spec=spec, run=run)
    said = explanation.compression
    assert (said and said.change) == change
    if said is None:
        return
    line = explanation.lines()[-1]
    assert line == f"would lose precision (docs/communication.md): {said.text}"
    settings = re.findall(r'(communication\.\w+) = "(\w+)"', line)
    again = search(spec, hardware, run.with_overrides([f"{key}={value}" for key, value in settings])).best
    assert again is not None
    rates = [require_prediction(plan).tokens_per_second for plan in (again, found.best)]
    percent = re.search(r": (\d+) % more tokens/s per rank$", line)
    assert percent is not None
    assert int(percent[1]) == round(100 * (rates[0] / rates[1] - 1))
