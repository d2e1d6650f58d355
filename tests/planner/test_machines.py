"""Machines side by side: each row has the best plan on one, or the reason why no plan fits."""

from typing import Any

import pytest

from fullshard.errors import SpecError
from fullshard.planner.machines import machine_record, parse_machines, plan_machines, show_machines
from fullshard.planner.result import PlanRequest
from fullshard.planner.search.search import search
from fullshard.planner.target import ModelToPlan
from fullshard.report.plan import TrainingBudget
from fullshard.spec.machine.hardware import Hardware
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

SPEC = decoder_spec(LLAMA_8B)
RESIDENT = run_for(LLAMA_8B, "train.global_batch=16", "offload.tier=none")
MACHINES = {
    "large": hardware_of(1, 8, gib=120),
    "twice": hardware_of(2, 8),
    "small": hardware_of(1, 1, gib=16),
}


def ask(name: str) -> PlanRequest:
    return PlanRequest(ModelToPlan("8B"), RESIDENT, MACHINES[name], described=SPEC)


def budget(hardware: Hardware, price: float | None) -> TrainingBudget:
    return TrainingBudget(tokens=10**12, price_per_hour=price)


def test_each_row_is_the_best_plan_with_its_price_or_a_reason(capsys: Any):
    rows = plan_machines(parse_machines("large@2.5, twice@$1, small"), ask, budget=budget)
    assert [row.plan for row in rows] == [search(SPEC, MACHINES[name], RESIDENT).best for name in MACHINES]
    assert [row.budget and row.budget.price_per_hour for row in rows] == [2.5, 1, None]
    records = [machine_record(row) for row in rows]
    assert [bool(one.get("plan")) for one in records] == [True, True, False]
    assert "no plan fits" in str(records[2]["reason"])
    show_machines(rows)
    lines = capsys.readouterr().out.splitlines()
    assert all(f"{one['budget']['dollars']:,.0f}" in "".join(lines) for one in records if one.get("plan"))  # type: ignore[index]
    assert any(line.startswith("small") and "no plan" in line for line in lines)


def test_a_name_keeps_its_blanks_and_counts():
    assert parse_machines(" 2x8xH100 @ 2.5,, my.toml ") == (("2x8xH100", 2.5), ("my.toml", None))


@pytest.mark.parametrize("text", ["", " , ", "8xH100@", "8xH100@free", "8xH100@-1", "8xH100@nan"])
def test_only_machines_and_positive_prices_are_taken(text: str):
    with pytest.raises(SpecError):
        parse_machines(text)
