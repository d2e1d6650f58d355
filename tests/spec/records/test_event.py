"""events.jsonl: whole lines of several writers, and whatever else is in the file costs no other line."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.spec.records.event import RunEvent, read_events


def append_many(path: Path, attempt: int) -> None:
    for step in range(200):
        details = {"path": "x" * (step * 20)}
        RunEvent.now("save", attempt=attempt, step=step, details=details).append_to(path)


def test_an_event_is_read_as_it_was_written(tmp_path: Path):
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    RunEvent.now("skip", attempt=2, step=7, details={"loss": math.nan, "what": "a\nb"}).append_to(
        tmp_path / "events.jsonl"
    )
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event.event, event.attempt, event.step) == ("skip", 2, 7)
    assert event.details == {"loss": None, "what": "a\nb"}
    assert before <= event.at <= datetime.now(UTC)
    assert json.loads((tmp_path / "events.jsonl").read_text())["at"].endswith("Z")


def test_writers_that_append_at_once_lose_no_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with ThreadPoolExecutor() as writers:
        list(writers.map(lambda attempt: append_many(path, attempt), (1, 2, 3)))
    for attempt in (1, 2, 3):
        assert [one.step for one in read_events(path) if one.attempt == attempt] == list(range(200))


@given(cut=st.integers(0, 200), torn=st.binary(max_size=20))
def test_torn_write_loses_one_line(tmp_path_factory: pytest.TempPathFactory, cut: int, torn: bytes):
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    for step in (1, 2, 3):
        RunEvent.now("save", attempt=1, step=step).append_to(path)
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - cut)] + torn.replace(b"\n", b"") * (cut > 0))
    whole = [event.step for event in read_events(path)]
    RunEvent.now("end", attempt=1).append_to(path)
    events = read_events(path)
    assert [event.step for event in events[:-1]] in (whole, [*whole, whole[-1] + 1 if whole else 1])
    assert events[-1].event == "end"


@pytest.mark.parametrize(
    "line", ["[]", "{}", "null", '{"at": 1}', '{"at": "now", "event": "end"}', "[" * 9999]
)
def test_lines_that_are_not_events_are_ignored(tmp_path: Path, line: str):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line}\n")
    RunEvent.now("end", attempt=1).append_to(path)
    assert [event.event for event in read_events(path)] == ["end"]


def test_a_run_without_the_file_has_no_events(tmp_path: Path):
    assert read_events(tmp_path / "events.jsonl") == []
