"""Ranks share sequences or matmuls by choice only where it may pay, and then as many as are fastest."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fullshard.errors import PlanError, ShardError
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.parallel_degrees import (
    DegreeSearch,
    choose_first_not_notably_slower,
    iterate_context_degrees,
    iterate_tensor_degrees,
    most_sequences_shared_by_ranks,
    search_parallel_degrees,
)
from fullshard.planner.search.search import SAME_SPEED, SearchResult
from fullshard.planner.target import choose_global_batch
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for
from tests.report.plans import predicted

HARDWARE = hardware_of(1, 8)
LONG, TOO_LONG = 131072, 262144
STYLES = "sharding.tensor_parallel_styles={head='head'}"  # which exclude ranks that divide experts


class Describing:
    """Describes a rank's part of LLAMA_8B's sequences and columns, and records the degrees it was asked."""

    def __init__(self, *, most: int = 1024) -> None:
        self.degrees: list[int] = []
        self.tensor_degrees: list[int] = []
        self.most = most

    def __call__(self, run: Run) -> ModelSpec:
        degree, length, tensor = (
            run.sharding.context_degree,
            run.data.sequence_length,
            run.sharding.tensor_degree,
        )
        self.degrees.append(degree)
        self.tensor_degrees.append(tensor)
        if max(degree, tensor) > self.most:
            raise ShardError("the sequences cannot be divided.")
        whole = replace(LLAMA_8B, sequence=length // degree)
        part = replace(whole, d_ff=whole.d_ff // tensor, vocabulary=whole.vocabulary // tensor)
        update = {"sequence_length": length, "context_parallel": degree, "tensor_parallel": tensor}
        update["flops_per_token"] = decoder_spec(whole).flops_per_token
        return decoder_spec(part).model_copy(update=update)


def long_run(*overrides: str, length: int = LONG, batch: int = 8) -> Run:
    """A run whose ranks share no matmuls."""
    shape = replace(LLAMA_8B, sequence=length)
    fixed = ("offload.tier=none", "sharding.tensor_parallel=1")
    return run_for(shape, f"train.global_batch={batch}", *fixed, *overrides)


def open_run(*overrides: str, batch: int, length: int = 8192) -> Run:
    """A run whose ranks may share both."""
    sizes = ("d_model=4096", "layers=32", "heads=32", "kv_heads=8", "d_ff=14336", "vocabulary=128256")
    model = (f"model.{size}" for size in sizes)
    return long_run(*model, "sharding.tensor_parallel=auto", *overrides, length=length, batch=batch)


def searched(describe: Describing, run: Run) -> DegreeSearch:
    return search_parallel_degrees(describe, run, hardware=HARDWARE)


def test_whole_sequences_that_fit_are_kept() -> None:
    describe = Describing()
    answer = searched(describe, long_run(length=8192))
    assert answer.found.best is not None
    assert answer.found.best.context_parallel == 1
    assert describe.degrees == [1]


def test_no_number_of_ranks_is_traced_for_a_unit_that_no_memory_holds() -> None:
    huge = replace(LLAMA_8B, d_ff=10**9)
    degrees: list[int] = []

    def describe(run: Run) -> ModelSpec:
        degrees.append(run.sharding.tensor_degree)
        return decoder_spec(huge)

    sizes = ["d_model=4096", "layers=32", "heads=32", "kv_heads=8", "d_ff=1000000000", "vocabulary=128256"]
    run = run_for(huge, "train.global_batch=8", *(f"model.{size}" for size in sizes))
    assert search_parallel_degrees(describe, run, hardware=HARDWARE).found.best is None
    assert degrees == [1]


def test_sequences_that_do_not_fit_are_shared_by_as_many_ranks_as_are_fastest() -> None:
    describe = Describing()
    answer = searched(describe, long_run("recompute.mode=full", length=TOO_LONG))
    assert describe.degrees == [1, 2, 4, 8]
    best = answer.found.best
    assert best is not None
    assert best.context_parallel == answer.spec.context_parallel == answer.run.sharding.context_parallel
    for degree in (1, 2, 4, 8):
        pinned = long_run("recompute.mode=full", f"sharding.context_parallel={degree}", length=TOO_LONG)
        one = searched(Describing(), pinned).found.best
        assert degree > 1 or one is None
        if one is not None:
            assert seconds(best) <= seconds(one) * (1 + SAME_SPEED)


def seconds(plan: Plan) -> float:
    return require_prediction(plan).time.total


@pytest.mark.parametrize(
    ("offloading", "sharing", "chosen"), [(10.0, 9.0, 2), (10.0, 10.2, 2), (10.0, 10.4, 1), (10.0, 10.0, 2)]
)
def test_a_plan_offloads_only_if_it_is_notably_faster(offloading: float, sharing: float, chosen: int) -> None:
    """Whole sequences with state on the host, or sequences that two ranks share with state on the device."""
    run = Run.load(overrides=["offload.tier=auto"])
    searches = [
        found_with(offloading, "offload.tier=optimizer:cpu"),
        found_with(sharing, "sharding.context_parallel=2"),
    ]
    assert choose_first_not_notably_slower(searches, run) is searches[chosen - 1]
    pinned = Run.load(overrides=["offload.tier=optimizer:cpu"])
    assert (
        choose_first_not_notably_slower(searches, pinned)
        is searches[0 if offloading <= 1.03 * sharing else 1]
    )


@pytest.mark.parametrize(("sharing", "chosen"), [(9.8, 1), (9.6, 2)])
def test_an_axis_is_taken_only_if_it_is_notably_faster(sharing: float, chosen: int) -> None:
    searches = [found_with(10.0), found_with(sharing, "sharding.tensor_parallel=2")]
    assert choose_first_not_notably_slower(searches, Run.load()) is searches[chosen - 1]


def found_with(step_seconds: float, *overrides: str) -> DegreeSearch:
    plan = predicted(*overrides, "run.compile=false", seconds=step_seconds)
    found = SearchResult(
        best=plan,
        fastest=plan,
        best_in_twice=plan,
        closest=None,
        by_strategy={},
        limit_bytes=1,
        considered=1,
        predicted=1,
    )
    return DegreeSearch(plan.run, decoder_spec(LLAMA_8B), found)


def test_fewer_sequences_than_ranks_are_divided() -> None:
    describe = Describing()
    answer = searched(describe, long_run(batch=2))
    assert answer.found.best is not None
    assert answer.found.best.data_parallel_degree <= 2
    assert set(describe.degrees) <= {4, 8}, "whole sequences, of which there are too few, are not described"


@pytest.mark.parametrize(("length", "most"), [(8192, 1024), (LONG, 1)])
def test_a_batch_smaller_than_the_ranks_is_refused_if_its_sequences_cannot_be_divided(
    length: int, most: int
) -> None:
    """Short ones, and those of a model that cannot be divided."""
    with pytest.raises(PlanError, match="cannot be shared out evenly") as error:
        searched(Describing(most=most), long_run(batch=2, length=length))
    assert "sharding.context_parallel = 4" in str(error.value.fix)


def test_a_number_that_is_set_is_kept() -> None:
    describe = Describing()
    answer = searched(describe, long_run("sharding.context_parallel=2", length=8 * LONG))
    assert answer.run.sharding.context_parallel == 2
    assert describe.degrees == [2]


@pytest.mark.parametrize(
    ("nodes", "per_node", "length", "degrees"),
    [(1, 8, LONG, [2, 4, 8]), (4, 8, LONG, [2, 4, 8, 16]), (3, 4, 12 * LONG, [2, 4, 12]), (1, 8, 8192, [])],
)
def test_context_degrees_follow_nodes(nodes: int, per_node: int, length: int, degrees: Sequence[int]) -> None:
    run = long_run(length=length, batch=96)
    assert list(iterate_context_degrees(hardware_of(nodes, per_node), run)) == degrees


def test_ranks_share_sequences_where_one_per_rank_makes_the_batch_too_large() -> None:
    run = long_run(length=8 * LONG)
    sequences, note = choose_global_batch(run, tokens=None, ranks=64, per_node=8)
    assert sequences == 16
    assert note is not None
    assert "4 or more of the 64 ranks share" in note
    assert most_sequences_shared_by_ranks(run, ranks=64, per_node=8, most_tokens=8 * LONG) == 1
    assert (
        most_sequences_shared_by_ranks(long_run(length=8192), ranks=64, per_node=8, most_tokens=8 * 8192)
        is None
    )
    pinned = long_run("sharding.context_parallel=8", length=8 * LONG)
    assert most_sequences_shared_by_ranks(pinned, ranks=64, per_node=8, most_tokens=8 * LONG) is None


def test_matmuls_are_not_shared_where_whole_ones_fit_and_little_is_waited_for() -> None:
    describe = Describing()
    assert searched(describe, open_run(batch=64)).found.best is not None
    assert describe.tensor_degrees == [1]


def assert_as_fast_as_any_degree(answer: DegreeSearch, run: Run, *, hardware: Hardware) -> None:
    best = answer.found.best
    assert best is not None
    assert best.tensor_parallel == answer.spec.tensor_parallel
    for tensor in (1, 2, 4, 8):
        pinned = run.with_settings({"sharding": {"tensor_parallel": tensor, "context_parallel": 1}})
        try:
            one = search_parallel_degrees(Describing(), pinned, hardware=hardware).found.best
        except PlanError:
            continue
        assert one is None or seconds(best) <= seconds(one) * (1 + SAME_SPEED)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_fastest_tensor_degree_for_fewer_sequences_than_ranks(batch: int) -> None:
    describe, run = Describing(), open_run(batch=batch)
    answer = searched(describe, run)
    assert_as_fast_as_any_degree(answer, run, hardware=HARDWARE)
    assert describe.tensor_degrees == [one for one in (2, 4, 8) if one * batch >= 8]


def test_ranks_may_share_matmuls_where_nodes_wait_for_parameters() -> None:
    slow = hardware_of(4, 8)
    assert slow.across is not None
    rate = slow.across.all_gather.model_copy(update={"bytes_per_second": 2e9})
    across = slow.across.model_copy(update={"all_gather": rate, "reduce_scatter": rate, "all_reduce": rate})
    pins = ("recompute.mode=full", "sharding.strategy=full_shard", "train.microbatch=1")
    slow, run = slow.model_copy(update={"across": across}), open_run(*pins, batch=32)
    describe = Describing()
    answer = search_parallel_degrees(describe, run, hardware=slow)
    assert describe.tensor_degrees == [1, 2, 4, 8]
    assert_as_fast_as_any_degree(answer, run, hardware=slow)


def test_no_more_ranks_share_work_where_kernels_take_nearly_all_of_the_step() -> None:
    """With links that cost nothing: there is nothing to gain."""
    rate = HARDWARE.within.all_gather.model_copy(update={"bytes_per_second": 1e14})
    links = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), rate)
    fast = HARDWARE.model_copy(update={"within": HARDWARE.within.model_copy(update=links)})
    run = open_run(batch=2, length=16384)
    tried: list[list[tuple[int, int]]] = []
    for hardware in (HARDWARE, fast):
        describe = Describing()
        answer = search_parallel_degrees(describe, run, hardware=hardware)
        tried.append(list(zip(describe.degrees, describe.tensor_degrees, strict=True)))
        assert_as_fast_as_any_degree(answer, run, hardware=hardware)
    assert tried == [[(2, 2), (1, 4), (1, 8)], [(2, 2)]]


@pytest.mark.parametrize(
    ("gib", "tried", "more"), [(10, (1, 1, 1), ()), (20, (4, 1, 1), ()), (10, (4, 4, 4), (STYLES,))]
)
def test_matmuls_are_shared_with_the_division_of_experts_of_the_first_good_plan(
    gib: int, tried: tuple[int, ...], more: tuple[str, ...]
) -> None:
    """The state of each of 8 ranks is 11 GiB: with 20 GiB, a plan may need no offload."""
    asked: list[tuple[int, int]] = []

    def describe(run: Run) -> ModelSpec:
        experts = 1 if run.sharding.expert_parallel == "auto" else run.sharding.expert_parallel
        asked.append((run.sharding.tensor_degree, experts))
        spec = Describing()(run)
        units = tuple(one.model_copy(update={"has_experts": one.is_block}) for one in spec.units)
        return spec.model_copy(update={"units": units, "expert_parallel": experts})

    open_ = ("model.experts=8", "sharding.expert_parallel=auto", "offload.tier=auto", "recompute.mode=full")
    hardware = hardware_of(1, 8, gib=gib).model_copy(update={"host_bytes_per_second": 5e10})
    answer = search_parallel_degrees(
        describe, open_run(*open_, *more, batch=64, length=2048), hardware=hardware
    )
    assert answer.found.best is not None
    counts = (len({experts for own, experts in asked if own == tensor}) for tensor in (2, 4, 8))
    assert tuple(counts) == tried


def test_models_and_settings_that_cannot_share_matmuls_keep_whole_ones() -> None:
    experts = [
        STYLES,
        "sharding.expert_parallel=2",
        "model.experts=4",
    ]
    for describe, more in ((Describing(most=1), []), (Describing(), experts)):
        with pytest.raises(PlanError, match="cannot be shared out evenly"):
            searched(describe, open_run(*more, batch=2))
    assert list(
        iterate_tensor_degrees(open_run("model.heads=4", "model.kv_heads=2", batch=8), per_node=8)
    ) == [2, 4]


def test_ranks_that_share_matmuls_make_a_batch_of_fewer_sequences() -> None:
    run = open_run(batch=1)
    sequences, note = choose_global_batch(run, tokens=None, ranks=16384, per_node=8)
    assert sequences == 2048
    assert note is not None
    assert "16.8M tokens a step" in note
    assert choose_global_batch(run, tokens=None, ranks=16384, per_node=4)[0] == 16384
