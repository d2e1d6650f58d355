"""Sampled and chosen steps are profiled on all ranks, each into a file, from which the spans are read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.cli.main import main
from fullshard.observe.profiles import StepProfiler
from fullshard.parallel.mesh import RankInfo
from fullshard.report.step_traces import list_profiles, read_step
from fullshard.spec.plan import Plan
from fullshard.spec.records.step_spans import COLLECTIVES, TERM_OF_SPAN
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.cli.test_trace import slice_table
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.report.profiles import overlaps_in_part
from tests.training.runs import mean_square, run_of, sharded
from tests.training.same_numbers import build, make_run


def made_profiler(directory: Path, *settings: str, rank: int = 0, first: int = 1, last: int = 5000) -> Any:
    return StepProfiler(
        Run.load(overrides=list(settings)).log,
        directory,
        ranks=RankInfo(rank, 2, rank, 2, torch.device("cpu")),
        attempt=2,
        first_step=first,
        last_step=last,
        say=print,
    )


@pytest.mark.parametrize(
    ("first", "last", "setting", "due"),
    [
        (1, 5000, "log.trace_every=1000", [10, 100, 1000, 2000, 3000, 4000, 5000]),
        (41, 60, "log.trace_every=25", [50]),
        (1, 7, "log.profile=[3, 9]", [3, 7]),
        (1, 4, "log.trace_every=1000", []),
        (1, 5000, "log.trace_every=0", []),
    ],
)
def test_sampled_and_chosen_steps(tmp_path: Path, first: int, last: int, setting: str, due: list[int]):
    profiler = made_profiler(tmp_path, setting, first=first, last=last)
    assert [step for step in range(first, last + 2) if profiler.is_due(step)] == due


def test_a_chosen_step_has_shapes_and_on_rank_0_stacks(tmp_path: Path, capfd: Any):
    for rank in (0, 1):
        profiler = made_profiler(tmp_path, "log.profile=[3]", rank=rank)
        with profiler.profile_step_to_file(3):
            torch.ones(3, 5) @ torch.ones(5, 2)
        assert (profiler.last.attempt, profiler.last.rank) == (2, rank)
        events = json.loads(gzip.decompress(list_profiles(tmp_path)[3][rank].read_bytes()))["traceEvents"]
        shapes = [one["args"]["Input Dims"] for one in events if one["name"] == "aten::mm"]
        assert shapes == [[[3, 5], [5, 2]]]
        assert any(one.get("cat") == "python_function" for one in events) == (rank == 0)
    assert capfd.readouterr() == ("", "")


def test_old_profiles_are_removed(tmp_path: Path, capsys: Any):
    profiler = made_profiler(tmp_path, "log.profile=[1]")
    for step in range(1, 14):
        with profiler.profile_step_to_file(step):
            pass
    assert list(list_profiles(tmp_path)) == [1, *range(4, 14)]
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "profiles").write_text("a file")
    blocked = made_profiler(tmp_path / "blocked")
    with blocked.profile_step_to_file(10):
        pass
    assert blocked.last is None
    assert "cannot be written" in capsys.readouterr().out


def profile_last_step(directory: str, settings: tuple[str, ...]) -> dict[str, float]:
    state, plan = sharded(run_of("train.steps=4", *settings))
    profiler, steps = (
        made_profiler(Path(directory), rank=dist.get_rank()),
        train(state, plan, loss=mean_square),
    )
    for _ in range(3):
        next(steps)
    with profiler.profile_step_to_file(4):
        next(steps)
    return profiler.last.seconds_by_name_on_compute_track()


@pytest.mark.parametrize(
    ("count", "settings", "waits"),
    [
        (2, ("sharding.strategy=full_shard",), {"all-gather", "reduce-scatter"}),
        (2, ("sharding.strategy=no_shard",), {"all-reduce"}),
        (
            4,
            ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
            {"all-gather", "reduce-scatter", "all-reduce"},
        ),
    ],
)
def test_trace_has_exposed_communication_of_each_unit(
    ranks, tmp_path: Path, count: int, settings: tuple[str, ...], waits: set[str]
):
    for names in ranks(count).run(profile_last_step, str(tmp_path), settings):
        assert names.keys() & TERM_OF_SPAN.keys() >= {"forward", "backward", "data", "update"}
        assert names.keys() >= {f"wait for {one}" for one in waits}
    measured, out = read_step(tmp_path, 4), tmp_path / "trace.json"
    assert [one.rank for one in measured] == list(range(count))
    assert all(overlaps_in_part(one.spans) == [] for one in measured)
    assert main(["trace", str(tmp_path), "--out", str(out)]) == 0
    query = "select distinct unit from slice where cat like ? and unit is not null"
    for wait in waits:
        units = {unit for (unit,) in slice_table(out).execute(query, [f"wait for {wait}"])}
        assert len(units) >= 2, wait


def profile_shared_work(directory: str, model: str, run: Run) -> tuple[set[tuple[str, str]], float, float]:
    """Names on the tracks of shared work; their seconds; and those of the term."""
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    built = shard(build(model, run), plan)
    state = TrainState(built, build_optimizer(built, plan), data=Rows(VOCABULARY))
    profiler = made_profiler(Path(directory), rank=dist.get_rank())
    with profiler.profile_step_to_file(1):
        next(train(state, plan))
    tracks = ("parts of sequences", "rows of experts")
    shared = [one for one in profiler.last.spans if one.track in tracks]
    seconds = sum(one.end - one.begin for one in shared)
    return {(one.track, one.name) for one in shared}, seconds, profiler.last.terms().model_parallel


GATHERED = {("parts of sequences", "gather of sequences"), ("parts of sequences", "reduction of sequences")}


@pytest.mark.parametrize(
    ("model", "axis", "names"),
    [
        ("decoder", {"context": 2}, GATHERED),
        ("decoder", {"tensor": 2}, GATHERED | {("parts of sequences", "reduction over ranks")}),
        (
            "mixture_decoder",
            {"expert": 2},
            {("rows of experts", "counts of rows"), ("rows of experts", "rows of experts")},
        ),
    ],
)
def test_collectives_of_model_parallel_axes_have_one_term(
    ranks, tmp_path: Path, model: str, axis: dict[str, Any], names: set[tuple[str, str]]
):
    assert {(track, wait.removeprefix("wait for ")) for track, wait in COLLECTIVES.values()} >= names
    run = make_run(model=model, ranks=2, strategy="full_shard", length=16, **axis)
    for found, seconds, term in ranks(2).run(profile_shared_work, str(tmp_path), model, run):
        assert found == names
        assert term == pytest.approx(seconds, rel=1e-3) != 0
