"""`fullshard trace`: a file that Perfetto's rules accept, which SQL can ask, and errors that help."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.planner.spans import predict_step_spans
from fullshard.planner.step_time import StepTimePredictor
from fullshard.profiler.recorded_step import PhaseMark, RangeMark, RecordedStep, step_spans
from fullshard.spec.measured_step import StepSpans
from fullshard.spec.run_files import METRICS, PREDICTED_STEP, SPANS
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import decoder_spec, plan_for
from tests.planner.test_offload import SMALL
from tests.planner.test_spans import check_sums_are_terms

MS = 1_000_000


def step_of(number: int, rank: int) -> StepSpans:
    """A step of 30 ms, in which rank 0 waits 2 ms for parameters, and rank 1 5 ms."""
    waits = (2 + 3 * rank) * MS
    names = ("data", "forward", "backward", "reduce", "optimizer", "between steps")
    at = (0, 1 * MS, 12 * MS, 26 * MS, 28 * MS, 30 * MS)
    step = RecordedStep(number, finished=30 * MS, end=31 * MS)
    step.phases = [PhaseMark(name, moment, 0) for name, moment in zip(names, at, strict=True)]
    step.ranges = [
        RangeMark("pre_forward", "blocks.0", 1 * MS, 8 * MS),
        RangeMark("all_gather", "blocks.0", 2 * MS, 2 * MS + waits),
        RangeMark("post_forward", "blocks.0", 11 * MS, 12 * MS),
        RangeMark("pre_backward", "blocks.0", 12 * MS, 13 * MS),
        RangeMark("post_backward", "blocks.0", 20 * MS, 26 * MS),
        RangeMark("reduce_scatter", "blocks.0", 21 * MS, 24 * MS),
    ]
    spans = tuple(step_spans(step))
    known = {"attempt": 1, "host": "h", "reason": "sampled", "seconds": step.seconds}
    return StepSpans(step=number, rank=rank, begin_ns=10**9 + rank * MS, spans=spans, **known)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    (directory / SPANS).mkdir(parents=True)
    (directory / METRICS).write_text("")
    for rank in range(2):
        lines = "".join(step_of(number, rank).to_line() + "\n" for number in (10, 20))
        (directory / SPANS / f"rank-{rank:05}.jsonl").write_text(lines + '{"step":30,"cut off')
    return directory


def add_predicted(directory: Path) -> Any:
    spec, hardware = decoder_spec(SMALL), hardware_of(1, 4)
    plan = plan_for(SMALL, 4, "sharding.strategy=full_shard")
    terms = StepTimePredictor(spec, hardware).predict_time(plan)
    spans = predict_step_spans(spec, plan, hardware=hardware)
    line = StepSpans.of_prediction(spans, seconds=terms.total).to_line()
    (directory / SPANS / PREDICTED_STEP).write_text(f"{line}\n")
    return terms


def slices(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X"]


def slice_table(path: Path) -> sqlite3.Connection:
    """A database with the table `slice` of a trace, as Perfetto's trace processor has it."""
    db = sqlite3.connect(":memory:")
    db.execute("create table slice (pid, name, cat, ts, dur, unit)")
    rows = [(s["pid"], s["name"], s["cat"], s["ts"], s["dur"], s["args"].get("unit")) for s in slices(path)]
    db.executemany("insert into slice values (?, ?, ?, ?, ?, ?)", rows)
    return db


def test_a_trace_has_a_process_per_rank_and_the_planned_step(run: Path, tmp_path: Path):
    terms, out = add_predicted(run), tmp_path / "t.json.gz"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["rank 0 on h", "rank 1 on h", "predicted: one rank"]
    ends: dict[tuple[int, int], list[float]] = {}
    for one in sorted(slices(out), key=lambda one: (one["pid"], one["tid"], one["ts"], -one["dur"])):
        stack, end = ends.setdefault((one["pid"], one["tid"]), []), one["ts"] + one["dur"]
        while stack and stack[-1] <= one["ts"] + 1e-4:
            stack.pop()
        assert not stack or end <= stack[-1] + 1e-4, one
        stack.append(end)
    # To the microsecond, as read back from the file.
    from fullshard.report.measured_steps import read_predicted_step

    predicted = read_predicted_step(run)
    assert predicted is not None
    total = max(one["ts"] + one["dur"] for one in slices(out) if one["pid"] == 3)
    assert total == pytest.approx(terms.total * 1e6, abs=1)
    check_sums_are_terms(predicted.spans, terms, within=1e-6)


def test_sql_finds_the_exposed_communication_of_each_unit(run: Path, tmp_path: Path):
    out = tmp_path / "t.json"
    assert main(["trace", str(run), "--step", "10", "--out", str(out)]) == 0
    db = slice_table(out)
    query = "select unit, cat, pid, sum(dur) from slice where cat like 'wait for %' group by unit, cat, pid"
    assert db.execute(query).fetchall() == [
        ("blocks.0", "wait for all-gather", 1, 2000.0),
        ("blocks.0", "wait for all-gather", 2, 5000.0),
        ("blocks.0", "wait for reduce-scatter", 1, 3000.0),
        ("blocks.0", "wait for reduce-scatter", 2, 3000.0),
    ]
    first = min(s["ts"] for s in slices(out) if s["pid"] == 2)
    assert first == 1000.0, "rank 1 began a millisecond later"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "11"], "holds no spans of step 11.\n  got: spans of steps 10, 20"),
        (["--out", "{run}/metrics.jsonl"], "metrics.jsonl"),
        (["--out", "{run}/other.txt"], "other.txt exists already."),
        (["--out", "{run}/absent/t.json"], "cannot be written"),
    ],
)
def test_a_wrong_step_or_file_is_refused(run: Path, arguments: list[str], message: str, capsys: Any):
    (run / "other.txt").write_text("mine")
    assert main(["trace", str(run), *(one.format(run=run) for one in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert (run / "other.txt").read_text() == "mine"


def test_a_run_without_spans_and_another_directory_are_told_apart(tmp_path: Path, capsys: Any):
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 2
    assert "the directory that run.dir names" in capsys.readouterr().err
    (tmp_path / METRICS).write_text("")
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 2
    assert "log.trace_every" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "absent"), "--out", str(tmp_path / "t.json")]) == 2
    assert "is not a directory" in capsys.readouterr().err
