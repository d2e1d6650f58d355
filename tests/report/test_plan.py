"""A plan's page says every term once, holds it against the whole, and fits 100 columns off a terminal."""

import io
import re

import pytest

import fullshard as fs
from fullshard.quantities import format_bytes
from fullshard.report.plan import (
    PlanReport,
    TrainingBudget,
    plan_rows,
    plan_table_rows,
    show_plan_table,
    term_label,
)
from fullshard.report.table import format_table_lines, labelled_lines, show_labelled_lines, show_table
from fullshard.spec.machine.certainty import SpeedDeviation
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import ActivationOffloadTerms, OffloadTerms, TimeTerms
from fullshard.spec.run import Run
from tests.report.plans import GIB, predicted


def page(plan: Plan, *, budget: TrainingBudget | None = None, why: tuple[str, ...] = ()) -> PlanReport:
    return PlanReport(plan, Run(), model="a model", hardware="8 × H100", why=why, budget=budget)


def rows(plan: Plan, *, budget: TrainingBudget | None = None) -> dict[str, str]:
    return {label.strip(): text for label, text in plan_rows(page(plan, budget=budget)) if label}


def with_prediction(plan: Plan, **fields: object) -> Plan:
    assert plan.prediction is not None
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=fields)})


def lines(plan: Plan) -> list[str]:
    return [text for _, text in plan_rows(page(plan))]


def test_every_term_has_words():
    prediction = predicted().prediction
    assert prediction is not None
    labels = [term_label(name) for name in (*prediction.memory.terms(), *TimeTerms.model_fields)]
    assert len(set(labels)) == len(labels)
    assert not any("_" in label for label in labels)


def test_memory_is_relative_to_the_device():
    said = rows(predicted())
    assert said["memory"] == "45.00 GiB of 80.00 GiB usable, on the fullest rank (56 %): 35.00 GiB free"
    assert said["activations"].split()[:4] == ["16.00", "GiB", "36", "%"]
    assert said["allocator reserve"].split()[:4] == ["4.00", "GiB", "9", "%"]
    assert "buffers" not in said, "what is nothing has no line"


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        ("microbatch 2, pre forward of norm+head", "before the forward of norm+head, microbatch 2"),
        ("microbatch 1, post backward of blocks.31", "after the backward of blocks.31, microbatch 1"),
        ("microbatch 1, end forward", "at the end of forward, microbatch 1"),
        ("optimizer step", "optimizer step"),
    ],
)
def test_the_moment_of_the_peak_is_a_phrase(moment: str, text: str):
    plan = predicted()
    prediction = plan.prediction
    assert prediction is not None
    memory = prediction.memory.model_copy(update={"moment": moment})
    assert rows(with_prediction(plan, memory=memory))["highest"] == text


def test_a_speed_lies_where_a_prediction_as_wrong_as_others_puts_it():
    """262 thousand tokens/s on 8 ranks may be a fifth less or twice as many."""
    some = page(predicted(seconds=4.0))._replace(certainty=SpeedDeviation(-0.5, 0.25, "90 % of some rows"))
    said = {label.strip(): text for label, text in plan_rows(some)}
    assert said["speed"] == "262k tokens/s, 32.8k per rank"
    start = "26.2k to 65.5k per rank: predicted 50 % too low to 25 % too high, as are "
    assert said["certainty"] == f"{start}90 % of some rows"


def test_checkpoints_in_the_background_take_host_memory():
    plan = predicted()
    assert "checkpoints" not in rows(plan)
    run = Run.load(overrides=["checkpoint.mode=async"])
    prediction = plan.prediction
    assert prediction is not None
    staged = prediction.memory.parameter_shards + prediction.memory.optimizer_state
    assert format_bytes(staged) in rows(plan.model_copy(update={"run": run}))["checkpoints"]


@pytest.mark.parametrize(("save", "staged"), [("all", 19 * GIB), ("adapters", 12 * GIB)])
def test_a_frozen_base_has_its_own_line_and_is_staged_if_it_is_saved(save: str, staged: int):
    own = ("adapter.rank=4", "adapter.base_dtype=nf4", f"adapter.save={save}")
    plan = predicted(*own, "checkpoint.mode=async")
    assert plan.prediction is not None
    memory = plan.prediction.memory.model_copy(update={"frozen_shards": 7 * GIB})
    text = rows(with_prediction(plan, memory=memory))
    assert text["adapter"] == "rank 4; the base is frozen, packed in nf4"
    assert text["frozen shards"].split()[:2] == ["7.00", "GiB"]
    assert text["checkpoints"].startswith(format_bytes(staged))


def test_a_plan_that_does_not_fit_says_by_how_much():
    said = rows(predicted(capacity=40 * GIB))
    assert said["memory"].endswith("(112 %): 5.00 GiB TOO MUCH")


def test_seconds_are_relative_to_the_step():
    said = rows(predicted())
    assert said["step"] == "2.0 s"
    assert said["compute"].split()[:4] == ["1.5", "s", "75", "%"]
    assert said["waiting: all-gather"].split()[:4] == ["500.0", "ms", "25", "%"]
    assert said["speed"] == "524k tokens/s, 65.5k per rank"
    assert said["MFU"] == "40.0 %"


def test_a_budget_is_time_and_hours_and_money():
    plan, tokens = predicted(), 15 * 10**12
    text = rows(plan, budget=TrainingBudget(tokens=tokens, price_per_hour=2.5))
    hours = 15e12 / (128 * 8192 / 2.0) / 3600 * 8
    assert text["15.0T tokens"] == f"{hours:,.0f} GPU hours"
    assert text["price"] == f"$2.50 for a GPU hour, ${2.5 * hours / 15000:.2f} per billion tokens"
    assert text["plan"] == f"fits; 524k tokens/s; 15.0T tokens in 331.1 days for ${2.5 * hours:,.0f}"
    text = rows(plan, budget=TrainingBudget(tokens=tokens))
    assert text["15.0T tokens"] == "63,578 GPU hours"
    assert "price" not in text
    assert text["plan"] == "fits; 524k tokens/s; 15.0T tokens in 331.1 days"


def test_a_price_alone_is_dollars_an_hour_and_for_a_billion_tokens():
    budget, plan = TrainingBudget(price_per_hour=2.5), predicted()
    text = rows(plan, budget=budget)
    assert text["plan"] == "fits; 524k tokens/s; $20.00 an hour; $10.60 per billion tokens"
    assert not any("tokens" in label for label in text)
    assert plan.prediction is not None
    record = budget.json_record(plan, plan.prediction)
    assert record["dollars_per_hour"] == 20
    assert record["dollars_per_billion_tokens"] == pytest.approx(20 / 3600 / (128 * 8192 / 2.0) * 1e9)
    assert record["tokens"] is record["dollars"] is record["seconds"] is None


def test_the_answer_is_the_first_line_and_is_of_the_plan_that_does_not_fit_too():
    label, text = next(iter(plan_rows(page(predicted(capacity=40 * GIB)))))
    assert (label, text) == ("plan", "does not fit: 5.00 GiB more than a rank has; 524k tokens/s")
    tight = ActivationOffloadTerms(host_bytes=3 * GIB, host_capacity_bytes=2 * GIB)
    assert rows(with_prediction(predicted(), activations=tight))["plan"].startswith(
        "does not fit, with 3.00 GiB of host memory per rank; "
    )
    unknown = rows(with_prediction(predicted(), offload=OffloadTerms(host_bytes=3 * GIB)))["plan"]
    assert unknown.startswith("fits, with 3.00 GiB of host memory per rank, which is not checked; ")


def test_a_printed_plan_is_its_page(monkeypatch: pytest.MonkeyPatch):
    plan = predicted()
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(plan).splitlines()
    assert str(plan) == fs.plan_page(plan)
    assert re.match(r"plan +fits; 524k tokens/s$", lines[0])
    assert {line.split("  ")[0] for line in lines} >= {"hardware", "strategy", "memory", "step", "MFU"}
    assert max(map(len, lines)) <= 80
    bare = plan.model_copy(update={"prediction": None})
    assert str(bare).endswith("none was made")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_is_as_wide_as_its_terminal(columns: int):
    """Nothing of a cell is lost, and no cell leaves its column."""
    header = ("", "runs/a-run-with-a-rather-long-name", "runs/another")
    cells = [("a label of several words that is long", "1234 tokens", "x" * 50), ("short", "", "1")]
    lines = list(format_table_lines(header, cells, columns=columns))
    assert max(map(len, lines)) <= columns
    for row in (header, *cells):
        for cell in row:
            assert all(word in "".join(lines) or len(word) > 12 for word in cell.split())
    assert "".join(lines).count("x") == 50
    assert len(list(format_table_lines(header, cells))) == 3


def test_requested_settings_are_marked():
    plan = predicted("sharding.strategy=zero2")
    asked = Run.load(overrides=["sharding.strategy=zero2"])
    said = {label: text for label, text in plan_rows(PlanReport(plan, asked, model="", hardware=""))}
    assert said["strategy"] == "shard_grad_op over 8 ranks  (as asked)"
    assert said["recompute"] == "none"


def test_long_text_wraps_in_its_column():
    out = io.StringIO()
    show_labelled_lines([("label", "word " * 30), ("other", "text")], file=out)
    first, second, other = out.getvalue().splitlines()
    assert (first[:12], second[:9], other) == ("label  word ", " " * 9, "other  text")


@pytest.mark.parametrize(("variable", "columns"), [("60", 60), ("140", 140), (None, 100)])
def test_lines_into_a_pipe_are_as_wide_as_the_environment_says(
    variable: str | None, columns: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if variable is not None:
        monkeypatch.setenv("COLUMNS", variable)
    for show in (
        lambda out: show_labelled_lines([("label", "word " * 60)], file=out),
        lambda out: show_table(["", "a column"], [["", "word " * 60]], file=out),
    ):
        out = io.StringIO()
        show(out)
        assert columns - 8 < max(map(len, out.getvalue().splitlines())) <= columns


@pytest.mark.parametrize("quantity", ["12 %", "1.50 GiB", "640 B", "18.0 ms", "18 h", "41 days"])
def test_a_number_and_its_unit_are_on_one_line(quantity: str):
    for length in range(40):
        assert quantity in "\n".join(labelled_lines([("", "x" * length + f" {quantity}, more")], columns=40))


def test_strategies_are_ordered_by_speed_and_lack():
    plans = [
        predicted("sharding.strategy=no_shard", capacity=30 * GIB),
        predicted("sharding.strategy=zero2", seconds=2.5),
        predicted("sharding.strategy=full_shard"),
        predicted("sharding.strategy=hybrid_shard", "sharding.shard_degree=4", capacity=44 * GIB),
    ]
    chosen = plans[2]
    table = plan_table_rows(chosen, plans)
    assert [row[0] for row in table] == ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]
    assert [row[-1] for row in table] == ["chosen", "+25 % time", "15.00 GiB over", "1.00 GiB over"]
    out = io.StringIO()
    show_plan_table(chosen, plans, file=out)
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_tier_has_its_memory_and_limit():
    plan = predicted()
    assert plan.prediction is not None
    terms = OffloadTerms(
        host_bytes=64 * GIB,
        host_capacity_bytes=32 * GIB,
        disk_bytes=96 * GIB,
        disk_read_bytes=48 * GIB,
        disk_written_bytes=48 * GIB,
        disk_seconds=30.0,
        update_seconds=2.0,
    )
    run = plan.run.with_overrides(["offload.tier=optimizer:nvme"])
    plan = with_prediction(plan, offload=terms).model_copy(update={"run": run})
    said = rows(plan)
    assert said["offload"] == "optimizer:nvme"
    assert said["host memory"] == "64.00 GiB of 32.00 GiB per rank: TOO MUCH"
    assert said["drive"] == "96.00 GiB per rank"
    assert said["at least"] == ("the longest of drive 30.0 s, update and sums of gradients 2.0 s")
    # 48 GiB every 2 seconds; each day has 86,400.
    assert "a step reads 48.00 GiB and writes 48.00 GiB" in lines(plan)
    assert "what is written wears it by 2.23PB a day for each rank" in lines(plan)
    known = terms.model_copy(update={"disk_seconds": None, "disk_read_bytes": 0})
    untimed = with_prediction(plan, offload=known)
    still = "a step reads 0 B (the state that an update needs is still in memory) and writes 48.00 GiB"
    assert {still, "what is written wears it"} <= set(lines(untimed))
    assert rows(untimed)["step"] == "2.0 s, without its drive"
    for state, mark in (("none", "not calibrated"), ("busy", "calibrated on a busy machine")):
        assert rows(with_prediction(plan, calibration=state))["step"] == f"2.0 s  ({mark})"
    assert "the drive's time is not known: fullshard calibrate --drive DIRECTORY" in lines(untimed)
    assert plan.prediction is not None
    assert not plan.prediction.fits_in_memory


@pytest.mark.parametrize(("tier", "room"), [(None, ""), (20 * GIB, ": TOO MUCH")])
def test_activations_on_the_host_beside_a_tier(tier: int | None, room: str):
    plan = predicted()
    assert plan.prediction is not None
    terms = {
        "activations": ActivationOffloadTerms(
            host_bytes=16 * GIB, copied_bytes=12 * GIB, copy_seconds=0.5, host_capacity_bytes=32 * GIB
        ),
        "offload": None if tier is None else OffloadTerms(host_bytes=tier, host_capacity_bytes=32 * GIB),
    }
    plan = with_prediction(plan, **terms)
    said = [text for label, text in plan_rows(page(plan))]
    assert f"16.00 GiB of 32.00 GiB per rank for activations{room}" in said
    assert "a step copies 12.00 GiB there and back, 500.0 ms in all" in said
    assert plan.prediction is not None
    assert plan.prediction.fits_in_memory == (not room)


def test_ranks_that_share_matmuls_share_a_batch():
    split = predicted().model_copy(update={"tensor_parallel": 4, "shard_degree": 2})
    said = dict(plan_rows(page(split)))
    assert said["tensor parallel"].startswith("matmuls over 4 ranks")
    assert "× 2 groups = 32 sequences" in " ".join(text for _, text in plan_rows(page(split)))
