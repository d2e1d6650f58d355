"""`fullshard watch` shows what a run does now, whatever state it is in, and reads each line of it once."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.report.run_record import MetricsReader, read_run
from fullshard.report.verdict import verdict
from fullshard.report.watch import WatchedRun, sparkline, watch_lines, watch_values
from fullshard.spec.records.live_status import HeldUp, LiveStatus, RankStatus
from tests.report.runs import (
    STARTED,
    begun,
    died,
    disturbed,
    finished,
    plan,
    start,
    write_events,
    write_steps,
)


def live_status(ranks: int = 2) -> LiveStatus:
    """Rank 1 has been in backward for a minute, after one step fewer than the others."""
    each = [
        RankStatus(
            rank=rank,
            host="node",
            process=100 + rank,
            step=40 - (rank == 1),
            phase="backward",
            seconds_in_phase=60.0 if rank == 1 else 0.1,
            memory={"peak_allocated_bytes": 300.0, "peak_reserved_bytes": 350.0, "allocator_retries": 2.0},
        )
        for rank in range(ranks)
    ]
    return LiveStatus(
        at=STARTED,
        interval_seconds=2,
        process="node:100",
        world_size=ranks,
        step=40,
        steps=100,
        tokens_per_second=1234.0,
        seconds_left=90.0,
        stragglers=(HeldUp(rank=1, cause="data", seconds=0.2),),
        phases={"backward": ranks},
        ranks=tuple(each),
    )


def running(directory: Path) -> Path:
    write_steps(directory, 40)
    write_events(directory, *start(1, plan("checkpoint.every=30")), ("save", 1, 30, {"path": "p"}))
    return directory


def watched(
    directory: Path, *, live: LiveStatus | None = None, is_running: bool = False, passed: float = 3.0
) -> WatchedRun:
    now = STARTED + timedelta(seconds=100)
    record = read_run(directory, is_running=is_running, now=now, is_brief=True)
    return WatchedRun(replace(record, live=live), now=now, last_step_at=now - timedelta(seconds=passed))


def screen(run: WatchedRun) -> str:
    return "\n".join(line.plain for line in watch_lines(run))


def test_a_running_run_shows_its_speed_saves_ranks_and_stragglers(tmp_path: Path):
    shown = screen(watched(running(tmp_path / "run"), live=live_status(), is_running=True))
    assert "running  step 40 of 100, 1 min 30 s left" in shown
    assert "1.23k tokens/s" in shown
    assert "step 30, 1 min 20 s ago; the next at step 60" in shown
    assert "rank 1 holds the others up: data, 200.0 ms per step" in shown
    assert "backward for 1 min" in shown
    assert "350 B reserved, 0 % of it fragmented, 2 retries" in shown
    assert "no step for" not in shown


@pytest.mark.parametrize(("trained", "text"), [(None, ""), (1000, ""), (200, "loss on 20.0 % of the tokens")])
def test_masked_labels_are_shown_beside_the_speed_if_they_are_known(
    tmp_path: Path, trained: int | None, text: str
):
    running(tmp_path / "run")
    write_steps(tmp_path / "run", 40, trained=trained)
    run = watched(tmp_path / "run", live=live_status(), is_running=True)
    for shown in (screen(run), verdict(run.record)):
        assert ("loss on" in shown) == bool(text)
        assert text in shown


def test_a_run_that_makes_no_steps_is_said_to_be_quiet(tmp_path: Path):
    run = watched(running(tmp_path / "run"), live=live_status(), is_running=True, passed=40.0)
    assert "no step for 40.0 s; one takes 50" in screen(run)


def test_runs_that_have_ended_show_how_they_ended(tmp_path: Path):
    ended = {made.__name__: watched(made(tmp_path / made.__name__)) for made in (finished, disturbed, died)}
    assert {name: run.record.state for name, run in ended.items()} == {
        "finished": "finished",
        "disturbed": "stopped",
        "died": "lost",
    }
    assert all(run.has_ended and "\nranks" not in screen(run) for run in ended.values())
    assert "it ended without recording why" in screen(ended["died"])


def test_a_run_before_its_first_step_can_be_watched(tmp_path: Path):
    shown = screen(watched(begun(tmp_path / "run"), is_running=True))
    assert "running  step 0 of 100" in shown


def test_of_many_ranks_those_that_are_behind_are_shown(tmp_path: Path):
    run = watched(running(tmp_path / "run"), live=live_status(64), is_running=True)
    assert len(run.shown_ranks()) == 8
    assert 1 in [one.rank for one in run.shown_ranks()]
    assert len(screen(run).splitlines()) <= 24, "a terminal's height"


def test_the_values_are_json_and_name_the_plan(tmp_path: Path):
    run = watched(running(tmp_path / "run"), live=live_status(), is_running=True)
    values = json.loads(json.dumps(watch_values(run), allow_nan=False))
    assert (values["state"], values["step"], values["saved_step"]) == ("running", 40, 30)
    assert values["live"]["ranks"][1]["phase"] == "backward"
    assert values["planned_tokens_per_second"] > 0


def test_a_live_file_of_another_kind_is_left_out(tmp_path: Path):
    (tmp_path / "live.json").write_text("[1, 2")
    assert LiveStatus.load_if_readable(tmp_path / "live.json") is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=20), st.integers(0, 400))
def test_lines_that_are_read_bit_by_bit_give_the_same_columns(
    tmp_path_factory, lines: list[tuple[int, int]], cut: int
):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    data = "".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in lines).encode()
    reader = MetricsReader(path)
    reader.read_new_lines()
    for end in (cut, len(data)):
        path.write_bytes(data[:0]) if not path.exists() else None
        with path.open("r+b") as file:
            file.write(data[:end])
        reader.read_new_lines()
    last = dict(lines)
    assert [*reader.columns.steps] == sorted(last)
    assert reader.columns.values("loss") == [last[step] for step in sorted(last)]


def test_a_file_that_a_rollback_replaced_is_read_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, 20)
    reader = MetricsReader(path)
    reader.read_new_lines()
    for steps, skipped in ((10, frozenset[int]()), (30, frozenset({3}))):  # shorter, and longer
        write_steps(tmp_path / "draft", steps, skipped=skipped)
        (tmp_path / "draft" / "metrics.jsonl").replace(path)
        reader.read_new_lines()
        assert reader.columns.last_step == steps
        anew = MetricsReader(path)
        anew.read_new_lines()
        assert reader.columns.points("loss") == anew.columns.points("loss")


def test_a_sparkline_spans_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], columns=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 100, columns=4) == "▁▁▁▁"
    assert sparkline([], columns=4) == ""
