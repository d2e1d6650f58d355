"""Tables of several plans: each row has the best plan of a case, or the reason why no plan fits."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from fullshard.errors import MissingExtraError, SpecError
from fullshard.planner.plan_tables import (
    LADDER,
    PlanRow,
    check_rungs_are_open,
    ladder_table,
    machines_table,
    parse_machines,
    plan_ladder,
    plan_machines,
)
from fullshard.planner.result import PlanRequest
from fullshard.planner.search.search import search
from fullshard.planner.target import PlanTarget
from fullshard.report.plan import TrainingBudget
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for
from tests.report.plans import predicted

SPEC = decoder_spec(LLAMA_8B)
RESIDENT = run_for(LLAMA_8B, "train.global_batch=16", "offload.tier=none")
MACHINES = {
    "large": hardware_of(1, 8, gib=120),
    "twice": hardware_of(2, 8),
    "small": hardware_of(1, 1, gib=16),
}


def ask(name: str) -> PlanRequest:
    return PlanRequest(PlanTarget("8B"), RESIDENT, MACHINES[name], spec=SPEC)


def budget(hardware: Hardware, price: float | None) -> TrainingBudget:
    return TrainingBudget(tokens=10**12, price_per_hour=price)


def test_each_row_is_the_best_plan_with_its_price_or_a_reason(capsys: Any):
    rows = plan_machines(parse_machines("large@2.5, twice@$1, small"), ask, budget=budget)
    assert [row.plan for row in rows] == [search(SPEC, MACHINES[name], RESIDENT).best for name in MACHINES]
    assert [row.budget and row.budget.price_per_hour for row in rows] == [2.5, 1, None]
    table = machines_table(rows)
    assert [bool(one.get("plan")) for one in table.record] == [True, True, False]
    assert "no plan fits" in str(table.record[2]["reason"])
    table.show()
    lines = capsys.readouterr().out.splitlines()
    costs = {str(one["machine"]): one["budget"]["dollars"] for one in table.record if one.get("plan")}  # type: ignore[index]
    assert f"cheapest  {min(costs, key=lambda name: costs[name])}" in lines
    assert any(line.startswith("small") and line.endswith("no plan") for line in lines)


def test_a_name_keeps_its_blanks_and_counts():
    assert parse_machines(" 2x8xH100 @ 2.5,, my.toml ") == (("2x8xH100", 2.5), ("my.toml", None))


@pytest.mark.parametrize("text", ["", " , ", "8xH100@", "8xH100@free", "8xH100@-1", "8xH100@nan"])
def test_only_machines_and_positive_prices_are_taken(text: str):
    with pytest.raises(SpecError):
        parse_machines(text)


RUN = run_for(LLAMA_8B, "train.global_batch=16")
QUESTION = PlanRequest(PlanTarget("8B"), RUN, hardware_of(1, 8, gib=120), spec=SPEC)


@dataclass(frozen=True)
class DecoderTarget(PlanTarget):
    """A target that needs no trace. `missing`: a value of `run.compile` that the installation cannot do."""

    missing: object = None

    def describe_model(self, run: Run, hardware: Hardware) -> ModelSpec:
        if self.missing is not None and run.run.compile == self.missing:
            raise MissingExtraError("hf", package="transformers", needed_for="this model")
        return replace_precision(run)


def replace_precision(run: Run) -> ModelSpec:
    return decoder_spec(replace(LLAMA_8B, precision=run.precision.mode), compiled=True)


def question(hardware: Hardware, **fields: object) -> PlanRequest:
    return PlanRequest(DecoderTarget("a decoder", **fields), RUN, hardware, spec=SPEC)  # type: ignore[arg-type]


def test_each_rung_is_the_fastest_plan_with_the_settings_of_all_below() -> None:
    run, hardware = RUN, hardware_of(1, 8)
    rungs = {rung.name: rung for rung in plan_ladder(question(hardware))}
    assert list(rungs) == [rung.name for rung in LADDER]
    for rung in LADDER:
        planned = rungs[rung.name]
        if planned.plan is None:
            assert planned.reason
            continue
        assert not planned.reason or rung.unpredicted
        run = run.with_overrides(rung.settings)
        assert planned.plan == search(replace_precision(run), hardware, run).best
    assert rungs["eager"].plan != rungs["compile"].plan


def test_ladder_of_the_cpu_lacks_gpu_rungs() -> None:
    missing = [rung for rung in plan_ladder(question(cpu_of(8))) if rung.plan is None]
    assert [rung.name for rung in missing] == ["segments", "fp8"]
    assert all(rung.reason for rung in missing)


def test_rungs_that_cannot_be_climbed_do_not_hold_up_the_others() -> None:
    rungs = {rung.name: rung for rung in plan_ladder(question(hardware_of(1, 8), missing=True))}
    assert "transformers" in rungs["compile"].reason
    above = rungs["chunked loss"].plan
    assert above is None or above.run.run.compile is False


def test_a_ladder_on_which_nothing_fits_has_reasons_only() -> None:
    rungs = plan_ladder(question(hardware_of(1, 1, gib=8)))
    assert all(rung.plan is None for rung in rungs)
    assert "more per rank" in rungs[0].reason


GAINS = [
    PlanRow("eager", predicted(seconds=2.0)),
    PlanRow("compile", predicted(seconds=1.6)),
    PlanRow("chunked loss", reason="the catalog has none"),
    PlanRow("fp8", predicted(seconds=1.0)),
]


def test_a_gain_is_over_the_last_rung_that_has_a_plan(capsys: Any) -> None:
    paid = TrainingBudget(tokens=10**12, price_per_hour=2.5)
    table = ladder_table([row._replace(budget=paid) for row in GAINS], question=QUESTION)
    gains = [one.get("gain") for one in table.record]
    assert [gain and gain["speed"] for gain in gains] == pytest.approx([None, 1.25, None, 1.6])  # type: ignore[index]
    table.show()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert {"time", "dollars"} <= set(table.header)
    assert any("the catalog has none" in line for line in lines)
    assert lines[-2].endswith("tokens/s +100.0 %, bytes per rank -, from eager to fp8")
    assert {"time", "dollars"}.isdisjoint(ladder_table(GAINS, question=QUESTION).header)


def test_bytes_that_a_rung_frees_are_negative() -> None:
    small = predicted()
    assert small.prediction is not None
    memory = small.prediction.memory.model_copy(update={"loss": 0})
    lighter = small.model_copy(update={"prediction": small.prediction.model_copy(update={"memory": memory})})
    table = ladder_table([PlanRow("eager", small), PlanRow("compile", lighter)], question=QUESTION)
    assert (table.rows[1][2], table.rows[1][5]) == ("-", "-6.00 GiB")


@pytest.mark.parametrize("setting", [one for rung in LADDER[:-1] for one in rung.settings])
def test_a_setting_of_a_rung_is_not_the_users(setting: str) -> None:
    with pytest.raises(SpecError, match="sets .* itself"):
        check_rungs_are_open(["train.steps=3", setting])
