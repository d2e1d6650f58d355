"""Logged figures can be read back from trackers, also after a resume; none ends a run."""

import json
import math
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.observe.trackers import (
    MOST_WAITING,
    TrackerStart,
    TrackerThread,
    check_trackers_installed,
    close_trackers,
    open_trackers,
)
from fullshard.spec.run import Run

# Their warnings are their own.
pytestmark = pytest.mark.filterwarnings("ignore")


class Notebook:
    """A tracker of another package. It fails in the step of loss -1, and waits in that of loss -2."""

    started: list[TrackerStart] = []
    waits = threading.Event()

    def __init__(self, start: TrackerStart) -> None:
        if start.settings["run.seed"] == 13:
            raise ZeroDivisionError("no notebook today")
        self.started.append(start)
        self.run_id = start.run_id or f"notebook {len(self.started)}"
        self.path = start.run_directory / "notebook.txt"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if values["loss"] == -1:
            raise ZeroDivisionError("the notebook is full")
        if values["loss"] == -2:
            self.waits.wait(60)
        self.write(f"{step}: {values['loss']}")

    def close(self, *, exit_code: int) -> None:
        self.write(f"ended {exit_code}")

    def write(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the entry point `notebook`. Returns the file that it writes."""
    info = tmp_path / "site" / "notebook-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fullshard.trackers]\nnotebook = {__name__}:Notebook\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    Notebook.started.clear()
    Notebook.waits.clear()
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "notebook.txt"


def run(directory: Path, *names: str, **section: object) -> Run:
    values = {"run": {"dir": str(directory)} | section, "log": {"trackers": names}}
    return Run.parse(values, source="the test")


def log_steps(opened: list[TrackerThread], *, exit_code: int = 0, after_step: int = 0) -> None:
    for tracker in opened:
        for step in range(after_step + 1, 4):
            norm = math.nan if step == 2 else 1.0
            tracker.log(step, {"loss": 3.0 / step, "skipped": False, "grad_norm": norm})
    close_trackers(opened, exit_code=exit_code)
    assert [tracker.take_messages() for tracker in opened] == [[]] * len(opened)


def test_unknown_tracker_is_refused_with_known_ones():
    with pytest.raises(SpecError, match="no tracker 'no_such_tracker'") as raised:
        check_trackers_installed(["no_such_tracker"])
    assert "there are tensorboard, wandb" in str(raised.value)
    assert "group 'fullshard.trackers'" in str(raised.value)


def test_no_tracker_needs_no_package():
    check_trackers_installed(())
    assert open_trackers(Run()) == []


def test_tracker_of_another_package_is_continued_by_its_id(notebook: Path):
    check_trackers_installed(["notebook"])
    for after_step in (0, 2):
        log_steps(
            open_trackers(run(notebook.parent, "notebook"), after_step=after_step), after_step=after_step
        )
    assert notebook.read_text().splitlines() == ["1: 3.0", "2: 1.5", "3: 1.0", "ended 0", "3: 1.0", "ended 0"]
    assert [start.run_id for start in Notebook.started] == [None, "notebook 1"]
    assert json.loads((notebook.parent / "trackers.json").read_text()) == {"notebook": "notebook 1"}
    assert Notebook.started[0].settings["run.dir"] == str(notebook.parent)


def test_a_tracker_that_fails_is_reported_once_and_the_others_have_everything(notebook: Path):
    [lost] = open_trackers(run(notebook.parent, "notebook"))
    [other] = open_trackers(run(notebook.parent, "notebook"))
    for step, loss in ((1, 3.0), (2, -1.0), (3, 1.0)):
        lost.log(step, {"loss": loss})
        other.log(step, {"loss": 10.0 + step})
    close_trackers([lost, other], exit_code=0)
    messages = [lost.take_messages(), lost.take_messages(), other.take_messages()]
    assert messages == [["notebook failed: ZeroDivisionError('the notebook is full')"], [], []]
    lines = notebook.read_text().splitlines()
    assert {"1: 3.0", "1: 11.0", "2: 12.0", "3: 13.0", "ended 0"} == set(lines)


def test_slow_tracker_delays_no_step(notebook: Path):
    [slow] = open_trackers(run(notebook.parent, "notebook"))
    slow.log(1, {"loss": -2})
    for step in range(2, MOST_WAITING + 10):
        slow.log(step, {"loss": 1})
    [message] = slow.take_messages()
    assert "notebook is slow: it lacks steps from step 100" in message
    slow.start_closing(exit_code=0)
    slow.wait_until_closed(seconds=0)
    assert "did not end within" in slow.take_messages()[0]
    Notebook.waits.set()
    slow.wait_until_closed(seconds=60)
    assert re.fullmatch("notebook was too slow: it lacks [89] steps", slow.take_messages()[0])
    assert notebook.read_text().splitlines()[-1] == "ended 0"


def test_a_tracker_that_does_not_start_ends_a_new_run_and_no_resumed_one(notebook: Path):
    asked = run(notebook.parent, "notebook", seed=13)
    with pytest.raises(SpecError, match="notebook does not start") as raised:
        open_trackers(asked)
    assert "no notebook today" in str(raised.value)
    said = list[str]()
    assert open_trackers(asked, after_step=3, say=said.append) == []
    assert "resumes without it" in said[0]


def test_tensorboard_keeps_every_step_and_a_resumed_run_shows_it_once(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after_step in (0, 1):
        log_steps(open_trackers(run(tmp_path, "tensorboard"), after_step=after_step), after_step=after_step)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_wandb_keeps_an_offline_run_and_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for after_step in (0, 1):
        log_steps(open_trackers(run(tmp_path, "wandb"), after_step=after_step), after_step=after_step)
    kept = sorted(tmp_path.rglob("run-*.wandb"))
    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert {one.stem for one in kept} == {f"run-{run_id}"}
    assert all(b"grad_norm" in one.read_bytes() for one in kept)
