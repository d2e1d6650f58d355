"""The GPU programme loses no result, runs nothing twice, and survives items that fail or hang."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.gpu.__main__ import main
from bench.gpu.items import ITEMS, Item, toy
from bench.gpu.programme import (
    LOG,
    PAGE,
    RESULTS,
    Programme,
    append_result,
    copy_earlier_results,
    read_results,
    run_programme,
)
from fullshard.spec.run import PrecisionMode, Run

# What an item's process does, by the item's name.
PROCESS = """
import json, subprocess, sys, time
name, result = sys.argv[1], sys.argv[3]
row = {"name": "1 microbatch", "predicted": {"step_seconds": 1.0}, "measured": {"step_seconds": 2.0}}
def save(unavailable=""):
    json.dump({"rows": [row], "details": {"seen": name}, "unavailable": unavailable}, open(result, "w"))
if name == "missing":
    save("there is no such module")
elif name == "fails":
    print("first line")
    sys.exit("out of memory")
elif name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    save()
    time.sleep(600)
else:
    save()
"""
COMMAND = (sys.executable, "-c", PROCESS)


def items(*names: str, most_seconds: float = 60) -> list[Item]:
    return [Item(name, f"what {name} shows", seconds=1, most_seconds=most_seconds) for name in names]


def run(out: Path, chosen: Sequence[Item], *, seconds: float = 100, again: bool = False) -> dict[str, Any]:
    programme = Programme(chosen, out, time.monotonic() + seconds, COMMAND, again=again)
    return {result["item"]: result for result in run_programme(programme)}


def is_running(pid: int) -> bool:
    """Returns whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_result_is_a_line_and_the_page_has_predicted_and_measured(tmp_path: Path) -> None:
    results = run(tmp_path, items("a", "b"))
    assert [result["status"] for result in results.values()] == ["done", "done"]
    assert [json.loads(line)["item"] for line in (tmp_path / RESULTS).read_text().splitlines()] == ["a", "b"]
    page = (tmp_path / PAGE).read_text()
    assert "step: predicted | measured" in page
    assert "| a | 1 microbatch | 1.0 s | 2.0 s |" in page


def test_items_with_a_result_are_not_measured_again(tmp_path: Path) -> None:
    first = run(tmp_path / "one", items("a"))
    copy_earlier_results(tmp_path / "one", tmp_path / "two")
    second = run(tmp_path / "two", items("a", "b"))
    assert second["a"] == first["a"]
    assert set(second) == {"a", "b"}
    assert run(tmp_path / "two", items("a"), again=True)["a"]["started"] >= first["a"]["started"]
    assert len((tmp_path / "two" / RESULTS).read_text().splitlines()) == 3


def test_an_item_that_fails_is_recorded_with_its_last_lines(tmp_path: Path) -> None:
    results = run(tmp_path, items("fails", "missing", "a"))
    assert [result["status"] for result in results.values()] == ["failed", "not available", "done"]
    assert "out of memory" in results["fails"]["reason"]
    assert results["missing"]["reason"] == "there is no such module"
    assert "===== fails: failed\nfirst line" in (tmp_path / LOG).read_text()
    assert "out of memory" in (tmp_path / PAGE).read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the processes")
def test_an_item_that_hangs_is_killed_with_its_processes_and_keeps_its_figures(tmp_path: Path) -> None:
    results: dict[str, Any] = {}
    for most_seconds in (4, 30):  # a busy machine may take long to start what hangs
        results = run(tmp_path / str(most_seconds), [*items("hangs", most_seconds=most_seconds), *items("a")])
        if results["hangs"]["rows"]:
            break
    assert [result["status"] for result in results.values()] == ["timed out", "done"]
    assert results["hangs"]["rows"][0]["measured"] == {"step_seconds": 2.0}
    child = int(results["hangs"]["reason"].split()[-1])
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_items_that_do_not_fit_into_the_time_are_left_for_another_time(tmp_path: Path) -> None:
    long = Item("long", "what takes long", seconds=1000)
    assert set(run(tmp_path, [long, *items("a")], seconds=60)) == {"a"}
    assert set(run(tmp_path, items("hangs"), seconds=2.5)) == {
        "a"
    }  # it was cut off by the end, not its limit


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    append_result(tmp_path, {"item": "a"})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"item": "b", "sta')
    append_result(tmp_path, {"item": "c"})
    assert [result["item"] for result in read_results(tmp_path)] == ["a", "c"]


def test_the_settings_of_all_items_are_valid_at_both_sizes() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    known = {f"precision.mode={mode}" for mode in get_args(PrecisionMode)}
    for item in (sized for full in ITEMS for sized in (full, toy(full)) if sized.settings):
        if any(setting.startswith("precision.mode=") and setting not in known for setting in item.settings):
            continue
        run = Run.load(overrides=[*item.settings, f"train.global_batch={max(item.microbatches)}"])
        assert run.train.microbatch == 1


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["--only", "nothing"], "no item matches nothing; --list shows all"),
        (["--resume", str(tmp_path / "absent")], "there is no such directory"),
        (["nothing"], "unknown: nothing; --only chooses items by name"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert reason in capsys.readouterr().err
    assert main(["--list", "--only", "3b/*"]) == 0
    assert "3b/eager" in capsys.readouterr().out


def measured_on_this_rank(name: str, directory: str) -> list[dict[str, Any]]:
    from bench.gpu.measure import Task, measure_item
    from bench.gpu.record import Record
    from fullshard.parallel.mesh import process_group

    item = toy(next(item for item in ITEMS if item.name == name))
    # The compiler takes a minute of each rank; the whole programme, which is for the long suite, compiles.
    item = replace(item, settings=(*item.settings, "run.compile=false"), microbatches=item.microbatches[:2])
    with process_group("cpu") as ranks:
        record = Record(Path(directory, "result.json"), writes=ranks.rank == 0)
        measure_item(Task(item, ranks, record, Path(directory), is_toy=True))
    assert not record.unavailable
    return record.rows


@pytest.mark.parametrize("name", ["3b/chunked-loss", "3b/plain-eager"])
def test_an_item_is_predicted_and_measured_at_toy_size(
    name: str, tmp_path: Path, ranks: Callable[..., Any]
) -> None:
    for rows in ranks(2, timeout_seconds=280).run(measured_on_this_rank, name, str(tmp_path)):
        for row in rows:
            figures = {"allocated_bytes", "step_seconds", "tokens_per_second"}
            assert figures <= set(row["predicted"])
            assert figures <= set(row["measured"])
            if name.endswith("chunked-loss"):
                assert row["measured"]["allocated_bytes"] == pytest.approx(
                    row["predicted"]["allocated_bytes"], rel=0.1
                )
    assert json.loads((tmp_path / "result.json").read_text())["details"]["plan"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_whole_programme_runs_at_toy_size(tmp_path: Path) -> None:
    assert main(["--toy", "--minutes", "100", "--out", str(tmp_path)]) == 0
    results = read_results(tmp_path)
    assert len(results) == len(ITEMS)
    missing = {result["item"] for result in results if result["status"] == "not available"}
    assert missing <= {"3b/torchtitan"}
