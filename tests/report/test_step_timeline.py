"""The page shows a step rank by rank above the planned one, and the ranks that held the others up."""

from pathlib import Path

from fullshard.report.step_timeline import MOST_ROWS
from fullshard.spec.run_files import PREDICTED_STEP, PROFILES
from fullshard.spec.step_spans import StepSpan, spans_to_json
from tests.report import runs
from tests.report.profiles import made_step
from tests.report.test_page import HOSTILE, read, shown


def write_steps(directory: Path, ranks: int, *, unit: str = "blocks.0", spans: int = 40) -> None:
    """Steps in which rank 1 waits least, and the planned step."""
    for rank in range(ranks):
        wait = 1000 if rank == 1 else 4000
        ranges = [("fullshard::forward", 0.0, 10_000.0 * spans)]
        for i in range(spans):
            begin, end = 10_000.0 * i, 10_000.0 * (i + 1)
            ranges.append((f"FSDP::pre_forward ({unit}.{i})", begin, begin))
            ranges.append(("fullshard::all_gather", end - wait, end))
            ranges.append((f"FSDP::post_forward ({unit}.{i})", end, end))
        made_step(*ranges, end=10_000 * spans).write(directory, step=100, rank=rank)
    planned = [StepSpan("compute", "forward", 0.0, 0.2, unit=unit)]
    (directory / PROFILES / PREDICTED_STEP).write_text(spans_to_json(planned))


def test_a_step_is_shown_with_its_units_above_the_planned_one(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    write_steps(directory, 2)
    page = shown(read(directory))
    assert "One step, rank by rank: colour is waiting" in page.headings
    assert all(text in page.text for text in ("rank 0", "rank 1", "planned", "forward, blocks.0."))
    assert "Rank 1 waited least for others: 40.0 ms" in page.text


def test_many_ranks_and_spans_stay_within_the_page(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    write_steps(directory, 20, unit=HOSTILE.replace("http", ""), spans=400)
    page = shown(read(directory))
    assert sum(text.startswith("rank ") for text in page.texts) == MOST_ROWS
    assert f"of 20 ranks, {MOST_ROWS} of them shown" in page.text


def test_stragglers_are_shown_from_where_to_where_they_held_the_others_up(tmp_path: Path):
    directory = runs.finished(tmp_path / "run")
    slow = {"rank": 2, "cause": "data", "from_step": 31, "seconds": 0.15, "share": 0.31}
    over = {"rank": 2, "cause": "data"}
    again = slow | {"rank": 1, "cause": HOSTILE.replace("http", ""), "from_step": 71, "seconds": "many"}
    runs.write_events(
        directory, ("straggler", 1, 40, slow), ("straggler_over", 1, 51, over), ("straggler", 1, 80, again)
    )
    page = shown(read(directory))
    assert "Ranks that held the others up" in page.headings
    assert all(text in page.text for text in ("31 … 51", "150.0 ms", "31 %", "71 … 100"))
    assert "rank 2 held the others up: data, 150.0 ms per step" in page.text
