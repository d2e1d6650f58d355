"""`fullshard report`: past runs beside what was said of them, or a message that says what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.errors import SpecError
from fullshard.jobs.run_directory import hold_run_lock
from fullshard.report.comparison import side_by_side_table
from fullshard.report.run_record import read_run
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.report.runs import STARTED, died, disturbed, finished
from tests.report.test_comparison import measured, prediction


def run_directory(path: Path, *, predicted: bool = True) -> Path:
    path.mkdir()
    measured().save(path / "measurement.json")
    plan = Plan.from_run(Run(), world_size=2)
    plan.model_copy(update={"prediction": prediction() if predicted else None}).save(path / "plan.json")
    return path


def test_runs_are_printed_in_order(tmp_path: Path, capsys: Any) -> None:
    one, other = run_directory(tmp_path / "one"), run_directory(tmp_path / "other")
    assert main(["report", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert text.count("predicted") == text.count("measured   ") == 2
    assert text.index(str(one)) < text.index(str(other))


def test_several_runs_are_compared_in_memory_seconds_and_events(tmp_path: Path, capsys: Any) -> None:
    one, other = finished(tmp_path / "one", "train.microbatch=2"), disturbed(tmp_path / "other")
    runs = [read_run(path, is_running=False, now=STARTED) for path in (one, other)]
    header, rows = side_by_side_table(runs)
    cells = {row[0].strip(): row[1:] for row in rows}
    assert header == ["", str(one), str(other)]
    assert cells["train.microbatch"] == ["2", "null"]
    assert cells["parameter shards"] == ["100 B", "100 B"]
    assert cells["compute, host"] == ["325.0 ms", "325.0 ms"]
    assert cells["fault"] == ["-", "1"]
    assert cells["save"] == ["1", "2"]
    order = [row[0] for row in rows if not any(row[1:])]
    assert order == ["settings", "memory", "step", "events"]
    assert main(["report", str(one), str(other)]) == 0
    assert "rollback" in capsys.readouterr().out


def test_a_page_of_several_runs_compares_them_and_draws_each(tmp_path: Path) -> None:
    runs, page = [finished(tmp_path / "one"), disturbed(tmp_path / "other")], tmp_path / "page.html"
    assert main(["report", *map(str, runs), "--html", str(page)]) == 0
    text = page.read_text()
    table = text.partition('<div class="run">')[0]
    assert "<td>events" in table
    assert "<td>  parameter shards" in table
    assert text.count('<div class="run">') == text.count('class="data">') == 2


def test_json_has_prediction_and_measurement(tmp_path: Path, capsys: Any) -> None:
    directory = run_directory(tmp_path / "run")
    assert main(["report", str(directory), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["directory"] == str(directory)
    assert record["prediction"]["memory"]["parameter_shards"] == 100
    assert record["measurement"]["step_seconds"]["compute"] == pytest.approx(0.3)
    gradients = next(line for line in record["comparison"]["memory"] if line["term"] == "gradients")
    assert gradients == {
        "term": "gradients",
        "predicted": 50,
        "measured": 40,
        "error_percent": pytest.approx(25),
    }


@pytest.mark.parametrize("has_plan", [True, False])
def test_run_without_a_prediction_shows_its_measurement(tmp_path: Path, has_plan: bool, capsys: Any) -> None:
    directory = run_directory(tmp_path / "run", predicted=False)
    if not has_plan:
        (directory / "plan.json").unlink()
    assert main(["report", str(directory)]) == 0
    said = capsys.readouterr()
    assert "activations, rest" in said.out
    assert "holds no prediction" in said.err


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (None, "is not a directory"),
        ([], "holds no run"),
        (["metrics.jsonl"], "holds no run"),
        (["measurement.json"], "holds no run"),
    ],
)
def test_directory_without_a_run_is_refused(
    tmp_path: Path, left: list[str] | None, message: str, capsys: Any
) -> None:
    directory = tmp_path / "run"
    if left is not None:
        directory.mkdir()
        for name in left:
            (directory / name).touch()
    assert main(["report", str(directory)]) == SpecError.exit_code
    assert message in capsys.readouterr().err


def test_report_of_a_run_that_died(tmp_path: Path, capsys: Any) -> None:
    run = died(tmp_path / "run")
    (run / "plan.json").write_text('{"version": 99}')
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert "Ended after step 40 of 100 without recording why" in said.out
    assert "predicted" in said.out
    assert "cannot read plan.json" in said.err
    assert main(["report", str(run), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["state"], record["step"], record["measurement"]) == ("lost", 40, None)


def test_page_replaces_only_a_page(tmp_path: Path, capsys: Any) -> None:
    run, page = finished(tmp_path / "run"), tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(run), "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    page.write_text("a thesis")
    assert main(["report", str(run), "--html", str(page)]) == SpecError.exit_code
    assert "--force" in capsys.readouterr().err
    assert main(["report", str(run), "--html", str(page), "--force"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "{run}/metrics.jsonl"], "a record of the run"),
        (["--html", "{run}"], "a directory"),
        (["--html", "{run}/absent/page.html"], "cannot be written"),
        (["--html", "page.html", "--json"], "give one of them"),
    ],
)
def test_unwritable_page_is_refused(tmp_path: Path, options: list[str], message: str, capsys: Any) -> None:
    run = finished(tmp_path / "run")
    assert main(["report", str(run), *(option.format(run=run) for option in options)]) == SpecError.exit_code
    assert message in capsys.readouterr().err


def test_a_page_says_whether_a_process_trains_the_run(tmp_path: Path) -> None:
    run, page = died(tmp_path / "run"), tmp_path / "page.html"
    with hold_run_lock(run):
        assert main(["report", str(run), "--html", str(page)]) == 0
    assert "Running: step 40 of 100 is done, about 30." in page.read_text()
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert "Ended after step 40 of 100" in page.read_text()
