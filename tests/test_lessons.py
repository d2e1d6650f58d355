"""The lessons of docs/learn print the tables that their pages show, exercises included."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "learn").glob("[0-9]-*.md"))
BY_HAND = ROOT / "docs" / "learn" / "from-fully-shard.md"
# A command and, in the next block, lines that it prints.
SHOWN = re.compile(
    r"^```console\n\$ torchrun --nproc-per-node (\d) (\S+) ?([^\n]*)\n```\n\n```text\n(.*?)^```", re.M | re.S
)


def run_program(path: str, arguments: list[str]) -> str:
    """Returns what a program of examples/learn prints on this rank."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str((ROOT / path).parent))  # as `python PATH` does
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(ROOT / path), run_name="__main__")
    finally:
        sys.path.pop(0)
    return out.getvalue()


def shown(page: Path) -> list[tuple[str, ...]]:
    return SHOWN.findall(page.read_text(encoding="utf-8"))


# The first command of a page is the lesson, the others are the answers to its exercises.
COMMANDS = [
    pytest.param(*one, id=f"{page.stem}-{i}", marks=[pytest.mark.long] if i else [])
    for page in PAGES
    for i, one in enumerate(shown(page))
]


@pytest.mark.parametrize(("count", "program", "arguments", "lines"), COMMANDS)
def test_a_lesson_prints_what_its_page_shows(
    count: str, program: str, arguments: str, lines: str, ranks: Any
) -> None:
    printed, *others = ranks(int(count)).run(run_program, program, shlex.split(arguments))
    expected = [line for line in lines.splitlines() if line != "…"]
    assert expected
    assert [line for line in printed.splitlines() if line in expected] == expected
    assert not any(others), "rank 0 prints"


def test_an_all_reduce_over_four_ranks_counts_as_in_a_ring(ranks: Any) -> None:
    printed, *_ = ranks(4).run(run_program, "examples/learn/lesson_1_data_parallel.py", [])
    (row,) = (line.split() for line in printed.splitlines() if line.startswith("in the step"))
    assert row[3:] == ["0", "0", "768", "768"], "2 · 3/4 of 512 KiB"


def refused_batch() -> str:
    with pytest.raises(SystemExit) as raised:
        run_program("examples/learn/lesson_2_zero1.py", ["train.microbatch=7"])
    return str(raised.value)


def test_a_batch_that_does_not_divide_is_an_error_without_a_traceback(ranks: Any) -> None:
    assert "train.global_batch" in ranks(2).run(refused_batch)[0]


def test_a_wrong_setting_of_a_lesson_is_an_error_without_a_traceback() -> None:
    with pytest.raises(SystemExit, match=r"^error: .*train.globl_batch"):
        run_program("examples/learn/lesson_1_data_parallel.py", ["train.globl_batch=8"])


def train_both_ways(directory: str) -> tuple[list[float], list[float]]:
    names: dict[str, Any] = {"__name__": BY_HAND.name}
    blocks = re.findall(r"^```python\n(.*?)^```", BY_HAND.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile("\n".join(blocks), BY_HAND.name, "exec"), names)  # the page is ours
    return names["train_by_hand"](6, f"{directory}/by-hand"), names["train_with_fullshard"](6, directory)


def test_the_loop_by_hand_and_the_one_with_fullshard_have_the_same_losses(ranks: Any, tmp_path: Path) -> None:
    for by_hand, own in ranks(2).run(train_both_ways, str(tmp_path)):
        assert own == pytest.approx(by_hand, rel=1e-5)
        assert by_hand[-1] < by_hand[0]


def test_each_lesson_has_a_page_with_a_prediction_and_exercises() -> None:
    assert len(PAGES) == 6
    programs = {str(path.relative_to(ROOT)) for path in ROOT.glob("examples/learn/lesson_*.py")}
    assert {shown(page)[0][1] for page in PAGES} == programs
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        sections = re.findall(r"^## (.*)", text, re.M)
        assert sections == ["Objectives", "What happens", "Predict", "Run", "Exercises", "Answers"]
        assert len(shown(page)) > 1, f"{page.name}: no exercise whose answer is run"
