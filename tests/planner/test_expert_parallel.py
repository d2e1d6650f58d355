"""The expert-parallel axis: its memory and its bytes, as real ranks have them, and the search over it."""

from functools import cache
from typing import Any

import pytest
import torch

from fullshard.errors import PlanError
from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.collectives import (
    CollectiveLayout,
    all_to_all_seconds,
    fullest_rank_row_excess,
)
from fullshard.planner.predict.unit_bytes import unit_bytes
from fullshard.planner.search.parallel_degrees import (
    DegreeSearch,
    choose_first_not_notably_slower,
    iterate_expert_degrees,
    search_parallel_degrees,
)
from fullshard.planner.search.search import predict, search
from fullshard.spec.machine.catalog import hardware_on, link_from_catalog, read_machine_tables
from fullshard.spec.machine.hardware import CollectiveRate
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.hardware import cpu_of, hardware_of
from tests.planner.measured import (
    described,
    evenly_routed,
    measured_in_two_steps,
    meta_model,
    model_parallel_bytes,
    moved_bytes,
    plan_of,
    predicted,
)
from tests.planner.search.test_search import prediction_of

LAYERS, RANKS, EXPERTS, CHOICES = 1, 4, 8, 2


def expert_plan(experts: int, *overrides: str, ranks: int = RANKS, **more: int) -> Plan:
    sizes = [f"model.experts={EXPERTS}", f"model.experts_per_token={CHOICES}", "model.expert_d_ff=128"]
    sizes += [f"model.layers={LAYERS}"]
    return plan_of(ranks, *sizes, f"sharding.expert_parallel={experts}", *overrides, **more)


def test_exchanged_bytes_equal_the_plan(ranks: Any) -> None:
    """In all; a single rank gets other numbers of rows than it sends. Recompute exchanges twice more."""
    exchanges, plan = 6, expert_plan(2, "recompute.mode=full", accumulation=2)
    tokens = plan.microbatch * plan.run.data.sequence_length
    rows = 4 * CHOICES * tokens * plan.run.decoder_config.d_model  # bytes of one exchange, fp32
    expected = exchanges * LAYERS * plan.accumulation * rows
    counted = ranks(RANKS).run(moved_bytes, plan)
    assert sum(own["exchange_rows"] for own in counted) == RANKS * expected
    counts = 8 * EXPERTS * LAYERS * plan.accumulation * (exchanges // 2 - 1)
    assert model_parallel_bytes(plan) == pytest.approx((expected + counts) / 2, rel=1e-9)  # to other ranks


def test_peak_of_real_ranks_is_near_the_plan(ranks: Any) -> None:
    """Routing by random weights is not quite balanced."""
    plan = expert_plan(2, "data.sequence_length=512", "model.max_sequence=512", "recompute.mode=none")
    real = [sum(parts.values()) for parts in ranks(RANKS).run(measured_in_two_steps, plan)]
    assert sum(real) / RANKS == pytest.approx(predicted(plan).total, rel=0.02)


@pytest.mark.parametrize(("ranks", "experts", "share"), [(8, 1, 8), (8, 8, 8), (64, 1, 64), (64, 4, 64)])
def test_ranks_share_experts_equally_even_if_these_are_fewer(ranks: int, experts: int, share: int) -> None:
    """Also with fewer experts than ranks, which shard them in another dim then."""
    plan = expert_plan(experts, "model.layers=1", ranks=ranks)
    unit = next(one for one in described(plan).units if one.has_experts)
    size = unit_bytes(unit, plan)
    assert size.shards * share == 4 * unit.numel
    assert size.gathered == (4 * unit.numel // experts if experts < ranks else size.gathered)


def test_exchange_between_nodes_uses_all_ranks_links() -> None:
    hardware = hardware_of(2, 8)
    assert hardware.across is not None
    rate = CollectiveRate(base_seconds=0, hop_seconds=0, bytes_per_second=1)
    link = hardware.across.model_copy(update={"all_gather": rate})
    slow = hardware.model_copy(update={"across": link})
    assert all_to_all_seconds(16, group=CollectiveLayout(16, 8, 2), hardware=slow) == pytest.approx(8)
    alone = hardware.model_copy(update={"across": None})
    with pytest.raises(PlanError, match="what joins its nodes"):
        all_to_all_seconds(16, group=CollectiveLayout(16, 8, 2), hardware=alone)


@pytest.mark.parametrize("size", [2**20, 2**30])
def test_an_exchange_over_more_nodes_takes_longer(size: int) -> None:
    """For as many bytes per rank: more of them cross, to more ranks."""
    hardware = hardware_on("16x8xH100")
    groups = [CollectiveLayout(8 * nodes, 8, nodes) for nodes in (1, 2, 4, 8, 16)]
    seconds = [all_to_all_seconds(size, group=group, hardware=hardware) for group in groups]
    assert seconds == sorted(seconds)


def test_no_links_all_to_all_is_faster_than_its_all_gather() -> None:
    for name in read_machine_tables("links"):
        link = link_from_catalog(name)
        assert link.all_to_all is not None
        assert link.all_to_all.bytes_per_second <= link.all_gather.bytes_per_second


def test_the_excess_of_the_fullest_rank_is_that_of_random_ranks() -> None:
    """Within 5 % from four ranks on."""
    torch.manual_seed(0)
    for ranks in (4, 32):
        loads = (0.2 * torch.randn(20_000, ranks, 2)).mean(-1)
        found = fullest_rank_row_excess(0.2, ranks=ranks, experts_per_rank=2)
        assert found == pytest.approx(loads.max(1).values.mean().item(), rel=0.05)


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_uneven_routing_lengthens_experts_and_exchanges(mode: str) -> None:
    """Their exchanges, and the work of experts; attention, the router and the loss stay as they are."""
    specs = [traced_spec(mode, 4).model_copy(update={"routing_spread": spread}) for spread in (0, 0.2, 0.4)]
    found = [prediction_of(predict(spec, open_plan(mode), cpu_of(8))) for spec in specs]
    times, memories = [one.time for one in found], [one.memory for one in found]
    factor = 1 + fullest_rank_row_excess(0.2, ranks=4, experts_per_rank=EXPERTS / 4)
    for term in ("compute", "model_parallel"):  # latency and other work take as long as with even routing
        first, second, third = (one.terms()[term] for one in times)
        assert first < second < factor * first
        assert third - second == pytest.approx(second - first, rel=1e-4)
    assert memories[0].uneven_rows == 0 < memories[1].uneven_rows < memories[2].uneven_rows
    assert memories[1].total - memories[1].uneven_rows == memories[0].total


def test_whole_experts_do_not_wait_for_uneven_routing() -> None:
    plan = expert_plan(1)
    specs = [described(plan).model_copy(update={"routing_spread": spread}) for spread in (0, 0.5)]
    even, uneven = (prediction_of(predict(spec, plan, cpu_of(RANKS))) for spec in specs)
    assert even == uneven


def test_numbers_of_ranks_follow_nodes_and_divide_the_experts() -> None:
    assert list(iterate_expert_degrees(hardware_of(4, 8), 16)) == [2, 4, 8, 16]
    assert list(iterate_expert_degrees(hardware_of(1, 8), 12)) == [2, 4]
    assert not list(iterate_expert_degrees(hardware_of(1, 8), 0))


def open_run(*overrides: str, ranks: int = 8) -> Run:
    plan = expert_plan(1, "model.expert_d_ff=1024", "precision.mode=bf16", ranks=ranks)
    axes = (
        f"sharding.{axis}_parallel={n}" for axis, n in (("expert", "auto"), ("tensor", 1), ("context", 1))
    )
    settings = [*axes, "sharding.strategy=auto", "offload.tier=none", "recompute.mode=none", *overrides]
    return Run.parse(plan.run.model_dump(mode="json"), source="here").with_overrides(settings)


@cache  # some seconds
def traced_spec(mode: str, degree: int) -> ModelSpec:
    run = open_run(f"recompute.mode={mode}", f"sharding.expert_parallel={degree}")
    return evenly_routed(describe(meta_model(expert_plan(1)), run, loss=next_token_loss))


def open_plan(mode: str) -> Plan:
    batch = ["train.microbatch=2", "train.global_batch=64", "sharding.strategy=full_shard"]
    own = [f"recompute.mode={mode}", "sharding.expert_parallel=4"]
    return Plan.from_run(open_run(*own, *batch), world_size=8)


@pytest.mark.parametrize(("nodes", "scale"), [(1, 1.0), (2, 0.02), (2, 20.0)])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_expert_degree_is_that_of_the_best_plan(nodes: int, scale: float, spread: float) -> None:
    """Not more than 3 % slower than the fastest, and the least that is not; also where few plans fit."""
    specs = {degree: traced_spec("none", degree) for degree in (1, 2, 4, 8)}
    run, hardware = open_run(), hardware_of(nodes, 8 // nodes, scale=scale)
    pinned = {degree: run.with_overrides([f"sharding.expert_parallel={degree}"]) for degree in specs}
    needs = [
        prediction_of(search(specs[degree], hardware, one).fastest).required_device_bytes
        for degree, one in pinned.items()
    ]
    chip = hardware.chip.model_copy(update={"memory_bytes": int(min(needs) * (0.9 + spread))})
    hardware = hardware.model_copy(update={"chip": chip})
    each = [
        DegreeSearch(one, specs[degree], search(specs[degree], hardware, one))
        for degree, one in pinned.items()
    ]
    fitting = [one for one in each if one.found.best is not None]
    found = search_parallel_degrees(lambda own: specs[own.sharding.expert_degree], run, hardware=hardware)
    best = choose_first_not_notably_slower(fitting, run) if fitting else each[0]
    assert (found.run, found.found) == (best.run, best.found)


@pytest.mark.parametrize("experts", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4))])
def test_ranks_that_divide_experts_multiply_as_many_rows_by_fewer_matrices(experts: int) -> None:
    """Each matrix gets the rows of all of these ranks."""
    plan = expert_plan(experts, "precision.mode=bf16")
    spec, tokens = described(plan), plan.microbatch * plan.run.data.sequence_length
    assert spec.is_mixture
    used = {index for phase in spec.trace_for_plan(plan).phases for index, _ in phase.work}
    grouped = [spec.kernels[index] for index in used if spec.kernels[index].rows.value_at(plan.microbatch)]
    assert grouped
    for kernel in grouped:
        assert kernel.pieces.value_at(plan.microbatch) == EXPERTS // experts
        rows = kernel.rows.value_at(plan.microbatch)
        assert rows * EXPERTS // experts == pytest.approx(CHOICES * tokens)
