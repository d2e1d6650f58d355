"""The page about a run: whole, alone, small, and safe whatever is in their records."""

import json
import os
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fullshard.report.page import render_page
from fullshard.report.run_record import RunRecord, read_run, read_steps
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.run_files import EVENTS
from tests.report import runs
from tests.report.test_comparison import measured

LARGEST_BYTES = 150_000
HOSTILE = '"><script>alert(1)</script>\u202e<img src=http://x onerror=y>'
FIGURES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "data_seconds", "peak_bytes")
_VOID = {"meta", "br", "hr", "img", "link", "input"}
_ENDED_BY_ANOTHER = {"p", "tr", "td", "th", "thead", "tbody"}  # HTML allows their end tags to be left out


class Page(HTMLParser):
    """The elements of a page. Fails if an element is closed that is not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert [tag for tag in self._open if tag not in _ENDED_BY_ANOTHER] == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open[-1] != tag and self._open[-1] in _ENDED_BY_ANOTHER:
            self._open.pop()
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["h2"]:
            self.headings.append(data)
        if self._open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def read(directory: Path, *, is_running: bool = False) -> RunRecord:
    return read_run(directory, is_running=is_running, now=runs.STARTED + timedelta(hours=1))


def shown(record: RunRecord) -> Page:
    html = render_page(record)
    assert "http" not in html.replace("http-equiv", ""), "a page makes no request"
    assert len(html.encode()) < LARGEST_BYTES
    return Page(html)


CHARTS = ("loss", "tokens/s of all ranks", "gradient norm", "learning rate", "waiting for data")


def test_a_finished_run_has_every_section(tmp_path: Path):
    page = shown(read(runs.finished(tmp_path / "run")))
    assert "Finished all 100 steps. Validation loss 2.1300." in page.text
    assert all(name in page.text for name in CHARTS)
    assert page.headings == [
        *("Predicted and measured", "Events", "The plan", "Settings that are not at their defaults")
    ]
    assert sum(tag == "svg" for tag, _ in page.tags) == len(CHARTS)
    assert "planned" in page.text


def test_results_of_evaluations_are_shown(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    lines = ({"step": step, "quiz.accuracy": step / 100, "<b>.x": 1.0, "a.b": None} for step in (0, 50, 100))
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    run = read(directory)
    assert run.metrics.results == {"quiz.accuracy": [(0.0, 0.0), (50.0, 0.5), (100.0, 1.0)]}
    page = shown(run)
    assert "Evaluations: quiz.accuracy 1.0000." in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == len(CHARTS) + 1


def test_page_of_a_disturbed_run(tmp_path: Path):
    page = shown(read(runs.disturbed(tmp_path / "run")))
    assert "Stopped after step 60 of 100, and saved" in page.text
    assert "2 attempts, 1 fault, 19 steps done again. 2 steps skipped. 1 rollback." in page.text
    for sign in ("saved", "resumed", "not finite", "stood out", "rolled back", "fault"):
        assert sign in page.texts, f"no row of signs for {sign}"
    assert "rank 1 was killed by SIGKILL." in page.text
    assert "rolled back to step 20: loss 9, gradient norm 99" in page.text
    assert "2 times; the last: left out, for it was not finite" in page.text


def test_page_of_a_run_that_died_omits_an_earlier_measurement(tmp_path: Path):
    run = read(runs.died(tmp_path / "run"))
    page = shown(run)
    assert run.measurement is None
    assert "Ended after step 40 of 100 without recording why" in page.text
    assert "2026-11-24 10:01:00 UTC" in page.text
    assert "Predicted and measured" in page.headings


def test_a_run_without_a_step_has_a_page(tmp_path: Path):
    page = shown(read(runs.begun(tmp_path / "begun"), is_running=True))
    assert "Running: step 0 of 100 is done." in page.text
    assert not any(tag == "svg" for tag, _ in page.tags)


def test_records_of_another_version_are_left_out_and_named(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    for name in ("measurement.json", "plan.json"):
        (directory / name).write_text('{"version": 99}')
    page = shown(read(directory))
    assert "cannot read measurement.json, which is left out." in page.text
    assert "cannot read plan.json" in page.text
    assert "The plan" in page.headings, "events.jsonl has it, too"


@pytest.mark.parametrize(
    ("last", "state"),
    [("fault", "failed"), ("restart", "restarting"), ("end", "finished"), ("start", "lost")],
)
def test_the_state_is_that_of_the_last_event(tmp_path: Path, last: str, state: str):
    runs.begun(tmp_path / "run")
    runs.write_events(tmp_path / "run", (last, 1, 7, {"rank": 0, "message": "m"}))
    now = runs.STARTED + timedelta(seconds=60)
    assert read_run(tmp_path / "run", is_running=False, now=now).state == state
    assert read_run(tmp_path / "run", is_running=True, now=now).state == "running"
    if last == "restart":
        assert read(tmp_path / "run").state == "lost", "it is not started again an hour later"


def test_a_long_run_has_a_small_page(tmp_path: Path):
    steps = 30_000
    runs.write_steps(tmp_path, steps)
    saves = [("save", 1, step, {"path": "p" * 50}) for step in range(500, steps, 150)]
    skips = [("skip", 1, step, {"loss": None}) for step in range(40, steps, 270)]
    events = sorted([*saves, *skips], key=lambda one: one[2])
    runs.write_events(tmp_path, *runs.start(1, runs.plan(steps=steps)), *events)
    assert "earlier rows are in events.jsonl" in shown(read(tmp_path)).text


def test_no_text_of_a_record_becomes_markup(tmp_path: Path):
    made = runs.plan(f"checkpoint.dir={HOSTILE}")
    directory = runs.finished(tmp_path / 'x"><script>alert(1)<' / "script>")
    names = ("message", "path", "rank", "error", "process", "signal", "ranks", "to_step", "saved")
    events: list[runs.EventFields] = [
        (kind, 1, 5, dict.fromkeys(names, HOSTILE))
        for kind in ("start", "save", "save_failed", "fault", "rollback", "resume", "signal", "stop", HOSTILE)
    ]
    runs.write_events(directory, *events, ("plan", 1, None, {"plan": made.model_dump(mode="json")}))
    page = Page(render_page(read(directory)))
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "class": "data"},
        {},
    ]
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "\u202e" not in page.text


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"step": 1e400, "loss": 1}',
        b'{"step": -3, "loss": 1}',
        b'{"step": "5", "loss": 1}',
        b'{"step": 200, "loss": "much", "seconds": [1], "grad_norm": 1e999, "skipped": "yes"}',
        b'{"step": 200, "loss": -5, "tokens_per_second": -1e300, "learning_rate": 1' + b"0" * 400 + b"}",
    ],
)
def test_lines_that_no_run_writes_break_no_page(tmp_path: Path, line: bytes):
    directory = runs.finished(tmp_path / "run")
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n" + b'{"step": 300, "los')
    with (directory / EVENTS).open("ab") as file:
        file.write(
            line + b'\n{"at": "2026-01-01T00:00:00Z", "event": "save", "seconds": 1e400, "step": 3}\n{"a'
        )
    page = shown(read(directory))
    assert any(tag == "svg" for tag, _ in page.tags)


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), ("NaN", "Infinity"), (5e-324, 2e-323, 0.0), (1e308, 5e-324, -0.0)]
)
def test_no_number_of_a_record_breaks_a_page(tmp_path: Path, values: tuple[Any, ...]):
    runs.finished(tmp_path / "run")
    (tmp_path / "run" / "measurement.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for step in range(1, 100):
            value = values[step % len(values)]
            file.write(
                f'{{"step": {step}, {", ".join(f"{chr(34)}{name}{chr(34)}: {value}" for name in FIGURES)}}}\n'
            )
    page = shown(read(tmp_path / "run"))
    assert "nan" not in page.text.lower().split()


def test_of_events_the_last_32_mib_are_read(tmp_path: Path) -> None:
    line = RunEvent.now("start", attempt=1).model_dump_json(exclude_none=True).encode() + b"\n"
    with (tmp_path / "events.jsonl").open("wb") as file:
        file.write(line)
        file.truncate(33 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line)
    assert len(read_events(tmp_path / "events.jsonl")) == 1


@pytest.mark.long
def test_more_than_two_million_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\n" * 2_000_001)
    with pytest.raises(OSError, match="more than 2,000,000 lines"):
        read_steps(tmp_path / "metrics.jsonl")


def test_records_without_a_newline_are_read_in_parts(tmp_path: Path):
    runs.finished(tmp_path / "run")
    event = (tmp_path / "run" / EVENTS).read_bytes().splitlines()[-1]
    for name in (EVENTS, "metrics.jsonl"):
        with (tmp_path / "run" / name).open("wb") as file:
            file.truncate(1 << 40)
    with (tmp_path / "run" / EVENTS).open("ab") as file:
        file.write(b"\n" + event + b"\n")
    record = read(tmp_path / "run")
    assert [one.event for one in record.events] == ["end"]
    assert record.last_step == 0


def test_the_pointer_reads_values_that_were_measured(tmp_path: Path):
    html = render_page(read(runs.finished(tmp_path / "run")))
    found = re.search(r'<script type="application/json" class="data">(.*?)</script>', html)
    assert found is not None
    data = json.loads(found[1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    (train,) = (line for line in data["lines"] if line["label"] == "train")
    assert train["steps"] == list(losses)
    assert train["values"] == pytest.approx(list(losses.values()), rel=1e-4)


def test_files_of_a_run_that_was_set_aside_are_in_its_new_directory(tmp_path: Path):
    directory, saved = runs.finished(tmp_path / "run.1"), "checkpoints/step-00000100"
    measured(checkpoint=f"runs/default/{saved}").save(directory / "measurement.json")
    elsewhere = "s3://bucket/step-00000100"
    paths = [f"runs/default/{saved}", f"runs/default.1/{saved}", elsewhere]
    runs.write_events(directory, *(("save", 1, 100, {"path": path}) for path in paths), ("end", 1, 100, {}))
    run = read(directory)
    assert run.measurement is not None
    assert run.measurement.checkpoint == str(directory / saved)
    known = [event.details["path"] for event in run.events_of_kinds("save")]
    assert known == ["p", str(directory / saved), f"runs/default.1/{saved}", elsewhere]


def test_each_slow_rank_is_an_event(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    slow = {"rank": 2, "cause": "data", "from_step": 31, "seconds": 0.15, "share": 0.31}
    again = slow | {"rank": 1, "cause": HOSTILE.replace("http", ""), "seconds": "many"}
    runs.write_events(directory, ("straggler", 1, 40, slow), ("straggler", 1, 80, again))
    text = shown(read(directory)).text
    assert "rank 2 held the others up from step 31: data, 150.0 ms per step (31 %)" in text
    assert "rank 1 held the others up from step 31: " in text


def test_the_page_names_ranks_that_ran_out_of_memory(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    lost = {"rank": 1, "phase": "forward", "held_bytes": 5 << 30, "path": "p/report.txt"}
    leak = {"rank": 1, "memory": "device memory"}  # an event of earlier versions
    runs.write_events(directory, ("leak", 1, 20, leak), ("out_of_memory", 1, 41, lost))
    text = shown(read(directory)).text
    assert "rank 1 ran out of memory in forward, while it held 5.00 GiB of tensors; see p/report.txt" in text
    assert "leak: rank 1, memory device memory" in text
