"""The table of the ladder: gains over the rung below, reasons, dollars where they are known."""

import io

import pytest

from fullshard.report.ladder import PlannedRung, ladder_record, rung_gains, show_ladder
from fullshard.report.plan import TrainingBudget
from tests.report.plans import predicted

RUNGS = (
    PlannedRung("eager", "whole logits", predicted(seconds=2.0)),
    PlannedRung("compile", "fused kernels", predicted(seconds=1.6)),
    PlannedRung("chunks", "logits in chunks", reason="the catalog has none"),
    PlannedRung("fp8", "matmuls in fp8", predicted(seconds=1.0)),
)


def printed(budget: TrainingBudget | None = None) -> list[str]:
    out = io.StringIO()
    show_ladder(RUNGS, budget=budget, file=out)
    return out.getvalue().splitlines()


def test_a_gain_is_over_the_last_rung_that_has_a_plan() -> None:
    gains = rung_gains(RUNGS)
    assert gains[0] is None
    assert gains[2] is None
    speeds = [gain.speed for gain in gains if gain is not None]
    assert speeds == pytest.approx([1.25, 1.6])


def test_bytes_that_a_rung_frees_are_negative() -> None:
    small = predicted()
    assert small.prediction is not None
    memory = small.prediction.memory.model_copy(update={"loss": 0})
    lighter = small.model_copy(update={"prediction": small.prediction.model_copy(update={"memory": memory})})
    gain = rung_gains([PlannedRung("a", "", small), PlannedRung("b", "", lighter)])[1]
    assert gain is not None
    assert (gain.speed_text, gain.bytes_text) == ("-", "-6.00 GiB")


def test_the_table_fits_a_hundred_columns_and_ends_with_the_whole_gain() -> None:
    lines = printed(TrainingBudget(tokens=10**12, price_per_hour=2.5))
    assert max(map(len, lines)) <= 100
    assert "dollars" in lines[0]
    assert any("the catalog has none" in line for line in lines)
    assert lines[-2].endswith("tokens/s +100.0 %, bytes per rank -, from eager to fp8")
    assert "microbatches of a step" in lines[-1], "what 1×16 means"


def test_time_stands_for_dollars_where_the_price_is_not_known() -> None:
    assert "time" in printed(TrainingBudget(tokens=10**12))[0]
    assert {"time", "dollars"}.isdisjoint(printed()[0].split())


def test_the_record_has_the_same_figures() -> None:
    record = ladder_record(RUNGS, TrainingBudget(tokens=10**12, price_per_hour=2.5))
    assert [one["rung"] for one in record] == [rung.name for rung in RUNGS]
    assert record[2]["reason"] == "the catalog has none"
    assert record[1]["gain"] == {"speed": pytest.approx(1.25), "added_bytes": 0}
    dollars = [one["budget"]["dollars"] for one in (record[0], record[1])]  # type: ignore[index]
    assert dollars[0] == pytest.approx(1.25 * dollars[1])
