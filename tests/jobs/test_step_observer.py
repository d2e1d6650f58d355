"""Steps between samples have no spans of units, cost no wrapped methods, and count the same waiting.

SQL finds each unit's exposed communication in the trace of a sampled one.
"""

from collections import Counter
from pathlib import Path

import pytest

from fullshard.cli.main import main
from fullshard.jobs.run_log import RunLog
from fullshard.jobs.step_observer import StepObserver, observe_steps
from fullshard.profiler.recorded_step import COLLECTIVES
from fullshard.report.measured_steps import find_steps, read_step
from fullshard.survival.phase import PhaseTracker
from fullshard.training.loop import train
from tests.cli.test_trace import slice_table
from tests.profiler.test_step_recorder import Wide, methods_of_units
from tests.report.nesting import overlaps_in_part
from tests.training.runs import mean_square, run_of, sharded

EVERY, EVENT, STEPS = 12, 14, 17
Observed = tuple[dict[int, bool], dict[int, Counter[str]], dict[int, bool]]


def observe(directory: str, settings: tuple[str, ...]) -> Observed:
    """By step: whether it has units, its collectives, and whether methods are as without an observer."""
    state, plan = sharded(run_of(f"train.steps={STEPS}", "train.microbatch=1", *settings), model=Wide)
    state.phase = PhaseTracker()
    plain: dict[int, bool] = {}
    before = methods_of_units(state.model)
    observed = observe_steps(
        state.model, state.phase, log=RunLog(every=50), directory=Path(directory), every=EVERY, first_step=1
    )
    with observed as observer:
        assert isinstance(observer, StepObserver)
        steps = train(state, plan, loss=mean_square)
        for number in range(1, STEPS + 1):
            plain[number] = methods_of_units(state.model) == before
            if number == EVENT:
                observer.note_event("skip", step=number)
            observer.observe_step(next(steps))
        observer.write_last()
        closed = list(observer.recorder.closed)
    assert methods_of_units(state.model) == before
    units = {one.step: any(each.unit is not None for each in one.ranges) for one in closed}
    kinds = {one.step: Counter(r.kind for r in one.ranges if r.kind in COLLECTIVES) for one in closed}
    return units, kinds, plain


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (2, ("sharding.strategy=full_shard",)),
        pytest.param(
            4, ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2"), marks=pytest.mark.long
        ),
    ],
)
def test_only_detailed_steps_have_units_and_all_have_the_same_collectives(ranks, tmp_path, count, settings):
    detailed = {*range(1, 11), EVERY, EVENT + 1}  # early ones, the sampled one, the one after an event
    for units, kinds, plain in ranks(count).run(observe, str(tmp_path), settings):
        assert {step for step, one in kinds.items() if one != kinds[10]} <= {1}
        if count == 2:  # sums over replicas are found by a method of each unit
            assert {step for step, one in units.items() if one} == detailed
            assert {step for step, one in plain.items() if not one} == detailed
    assert set(find_steps(tmp_path)) == {10, EVERY, EVENT - 1, EVENT, EVENT + 1}
    assert [one.reason for one in read_step(tmp_path, EVENT + 1)] == ["skip"] * count
    check_exposed_communication_of_each_unit(tmp_path, step=EVERY)


def check_exposed_communication_of_each_unit(directory: Path, *, step: int) -> None:
    """SQL over the trace's file finds it, on each rank, and no spans that a viewer would drop."""
    out = directory / "trace.json"
    assert main(["trace", str(directory), "--step", str(step), "--out", str(out)]) == 0
    query = "select pid, unit, sum(dur) from slice where cat like 'wait for %' group by pid, unit"
    found = {(pid, unit): dur * 1e-6 for pid, unit, dur in slice_table(out).execute(query)}
    measured = read_step(directory, step)
    waits: dict[tuple[int, str | None], float] = {}
    for pid, one in enumerate(measured, 1):
        assert overlaps_in_part(one.spans) == []
        for span in one.spans:
            if span.name.startswith("wait for "):
                waits[pid, span.unit] = waits.get((pid, span.unit), 0.0) + span.end - span.begin
    assert found == pytest.approx(waits, abs=1e-6)
    assert {unit for _, unit in found} >= {f"layers.{i}" for i in range(4)}
