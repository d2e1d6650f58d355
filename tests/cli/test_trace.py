"""`fullshard trace`: a file that Perfetto's rules accept, which SQL can ask, and errors that help."""

import gzip
import json
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.spec.records.run_files import METRICS, PROFILES
from tests.report.profiles import made_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps of 30 ms, in which rank 0 waits 2 ms for parameters, and rank 1, which began 1 ms later, 5 ms."""
    directory = tmp_path / "run"
    for number, rank in product((10, 20), range(2)):
        wait = 2000 + 3000 * rank
        made_step(
            ("fullshard::data", 0, 1000),
            ("fullshard::forward", 1000, 12_000),
            ("FSDP::pre_forward (blocks.0)", 1000, 8000),
            ("fullshard::all_gather", 2000, 2000 + wait),
            ("FSDP::post_forward (blocks.0)", 11_000, 12_000),
            ("fullshard::backward", 12_000, 26_000),
            ("FSDP::post_backward_reduce (blocks.0)", 20_000, 26_000),
            ("fullshard::reduce_scatter", 21_000, 24_000),
            ("fullshard::update", 28_000, 30_000),
            end=30_000,
            base_ns=10**9 + rank * 10**6,
        ).write(directory, step=number, rank=rank)
    (directory / METRICS).write_text("")
    (directory / PROFILES / "step-00000030-rank-00000.json.gz").write_text("cut off")
    return directory


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


def test_a_trace_has_a_process_per_rank_with_nested_spans(run: Path, tmp_path: Path):
    out = tmp_path / "t.json.gz"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["rank 0 on h", "rank 1 on h"]
    ends: dict[tuple[int, int], list[float]] = {}
    for one in sorted(slices(out), key=lambda one: (one["pid"], one["tid"], one["ts"], -one["dur"])):
        stack, end = ends.setdefault((one["pid"], one["tid"]), []), one["ts"] + one["dur"]
        while stack and stack[-1] <= one["ts"] + 1e-4:
            stack.pop()
        assert not stack or end <= stack[-1] + 1e-4, one
        stack.append(end)


def test_sql_finds_the_exposed_communication_of_each_unit(run: Path, tmp_path: Path):
    out = tmp_path / "t.json"
    assert main(["trace", str(run), "--step", "10", "--out", str(out)]) == 0
    query = "select unit, cat, pid, sum(dur) from slice where cat like 'wait for %' group by unit, cat, pid"
    with closing(slice_table(out)) as db:
        found = db.execute(query).fetchall()
    assert found == [
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
        (["--step", "11"], "holds no profile of step 11.\n  got: profiles of steps 10, 20, 30"),
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


def test_directories_without_profiles_are_refused(tmp_path: Path, capsys: Any):
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 2
    assert "the directory that run.dir names" in capsys.readouterr().err
    (tmp_path / METRICS).write_text("")
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 2
    assert "log.trace_every" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "absent"), "--out", str(tmp_path / "t.json")]) == 2
    assert "is not a directory" in capsys.readouterr().err
