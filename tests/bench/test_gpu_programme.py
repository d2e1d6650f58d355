"""The GPU programme loses no result, runs nothing twice, and survives items that fail or hang."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from bench.gpu.__main__ import item_command, main
from bench.gpu.items import ONCE, Card, Item, Variant, at_card, total_seconds, toy
from bench.gpu.one_gpu import ONE_GPU, is_later
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
from bench.gpu.programme_items import ITEMS, choose_items, find_item
from bench.gpu.record import Record
from bench.gpu.runs import greatest_difference, groups_that_run_at_once
from bench.gpu.task import Task
from fullshard.planner.predict.offload import with_infinitely_fast_drive
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan
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
    # As torchrun's ranks: in a session of its own, and deaf to the signal that ends its parent.
    sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
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
    programme = Programme(chosen, out, time.monotonic() + seconds, lambda _: COMMAND, again=again)
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
    for full in ITEMS:
        for item in (at_card(full, "h200"), at_card(full, "h100"), toy(full)):
            assert known >= {setting for setting in item.settings if setting.startswith("precision.mode=")}
            names = [variant.name for variant in item.variants]
            for variant in item.variants or (Variant("none"),):
                before = names[: names.index(variant.name)] if names else []
                assert {variant.like, variant.continues} <= {"", *before}
                run = Run.load(overrides=[*item.settings, *variant.settings])
                Plan.from_run(run, world_size=max(item.ranks, variant.ranks), device="cuda")


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
    from bench.gpu.measure import measure_item
    from fullshard.parallel.mesh import process_group

    item = toy(next(item for item in ITEMS if item.name == name))
    # The compiler takes a minute of each rank; the whole programme, which is for the long suite, compiles.
    item = replace(item, settings=(*item.settings, "run.compile=false"), microbatches=item.microbatches[:1])
    with process_group("cpu") as ranks:
        record = Record(Path(directory, "result.json"), writes=ranks.rank == 0)
        measure_item(Task(item, ranks, record, Path(directory), is_toy=True))
    assert not record.unavailable
    return record.rows


@pytest.mark.parametrize("name", ["3b/chunked-loss", pytest.param("3b/plain-eager", marks=pytest.mark.long)])
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
    assert main(["--toy", "--minutes", "110", "--out", str(tmp_path)]) == 0
    results = read_results(tmp_path)
    assert len(results) == len(ITEMS)
    missing = {result["item"] for result in results if result["status"] == "not available"}
    assert missing <= {"3b/torchtitan", "dp/torchtitan"}


def plan_on_card(item: Item, card: Card) -> list[int]:
    """Returns the numbers of microbatches that the planner has a plan for, on the catalog's card."""
    from bench.gpu.measure import choose_plans
    from fullshard.parallel.mesh import RankInfo

    @dataclass(frozen=True)
    class OnCard(Task):
        def hardware(self) -> Hardware:
            return with_infinitely_fast_drive(hardware_on(f"{self.ranks.world_size}x{card}"))

    world = max(item.ranks, 8 if item.ranks > 1 else 1)
    ranks = RankInfo(0, world, 0, world, torch.device("cuda"))
    record = Record(Path("unwritten"), writes=False)
    return [
        one.microbatches for one in choose_plans(OnCard(at_card(item, card), ranks, record, Path("x"), False))
    ]


@pytest.mark.parametrize("card", get_args(Card))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(item.name, marks=[] if item.name == "3b/eager" else [pytest.mark.long])
        for item in ITEMS
        if item.kind == "train"
    ],
)
def test_every_training_item_fits_on_both_cards(name: str, card: Card) -> None:
    assert plan_on_card(next(item for item in ITEMS if item.name == name), card)


def test_the_first_items_for_one_gpu_take_less_than_forty_minutes_and_tests_come_early() -> None:
    first = [item for item in ONE_GPU if not is_later(item)]
    assert total_seconds(first) <= 36 * 60
    assert [item.name for item in first[:4]] == ["kernels", "smoke/train", "smoke/generate", "tests"]
    assert ONE_GPU[: len(first)] == tuple(first)


def test_an_item_that_starts_its_own_ranks_is_one_process_and_has_no_variables_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for item in ITEMS:
        command = item_command(item, ranks=8, card="h100", is_toy=False)
        assert ("torch.distributed.run" in command) == (item.kind not in ONCE)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    seen = """import json, os, sys
json.dump({'rows': [], 'details': dict(os.environ), 'unavailable': ''}, open(sys.argv[3], 'w'))"""
    programme = Programme(items("a"), tmp_path, time.monotonic() + 60, lambda _: (sys.executable, "-c", seen))
    [result] = run_programme(programme)
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & result["details"].keys()


def test_memory_that_is_still_in_use_is_recorded(tmp_path: Path) -> None:
    answers = iter([[9000, 0], [0, 0]])
    ends = time.monotonic() + 60
    programme = Programme(items("a"), tmp_path, ends, lambda _: COMMAND, used_memory=lambda: next(answers))
    [result] = run_programme(programme)
    assert "MiB in use before" not in result["details"], "the programme waited until it was free"
    assert next(answers, None) is None


def test_a_run_that_others_begin_as_ends_before_they_start() -> None:
    begun, copies = Variant("begun"), [Variant(name, begins_as="begun") for name in "abc"]
    variants = (begun, *copies, Variant("two", ranks=2), Variant("last"))
    groups = [[one.name for one in group] for group in groups_that_run_at_once(variants, most=2)]
    assert groups == [["begun"], ["a", "b"], ["c"], ["two"], ["last"]]


def test_runs_that_differ_are_wrong() -> None:
    steps = {1: {"loss": 2.0, "grad_norm": 1.0}, 2: {"loss": 1.0, "grad_norm": 1.0}}
    assert greatest_difference(steps, steps) == 0
    assert greatest_difference({2: {"loss": 1.1}}, steps) == pytest.approx(0.1)
    assert greatest_difference({2: {"grad_norm": 2.0}}, steps) == pytest.approx(0.1)
    assert greatest_difference({3: {"loss": 2.0}}, steps) == float("inf"), "nothing was compared"


def test_items_for_several_ranks_are_chosen_by_their_number() -> None:
    assert {item.ranks for item in choose_items(None, ranks=1, is_toy=False)} == {1}
    assert {item.ranks for item in choose_items(None, ranks=4, is_toy=False)} == {2, 4}
    assert choose_items(None, ranks=8, is_toy=True) == list(ITEMS)
    assert find_item("3b/eager", card="h100", is_toy=False).settings.count("data.sequence_length=4096") == 1
