"""Machines side by side: the best plan on each, its speed, and what a number of tokens costs there."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fullshard.errors import PlanError, SpecError
from fullshard.planner.result import PlanRequest, fastest_plan
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.quantities import format_bytes, format_count
from fullshard.report.plan import (
    TrainingBudget,
    format_dollars,
    format_duration,
    mesh_text,
    recompute_text,
)
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.spec.machine.catalog import find_catalog_entry_of_chip
from fullshard.spec.machine.certainty import certainty_of
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan


class Machine(NamedTuple):
    """A machine that the user names: `8xH100`, or `8xH100@2.5` with dollars per GPU hour."""

    name: str
    price_per_hour: float | None


class MachinePlan(NamedTuple):
    """The best plan on a machine, or the reason why there is none.

    question: what was planned; None if the batch cannot be divided over the machine's ranks
    budget: the tokens to train on, at this machine's price; None if the user gave no tokens
    """

    machine: Machine
    question: PlanRequest | None = None
    plan: Plan | None = None
    budget: TrainingBudget | None = None
    reason: str = ""


def parse_machines(text: str) -> tuple[Machine, ...]:
    """Returns the machines of `8xH100@2.5, 4x8xH200`. Raises SpecError for an empty list or a price."""
    machines = tuple(_parse_machine(part.strip()) for part in text.split(",") if part.strip())
    if not machines:
        raise SpecError("--machines names none.", got=repr(text), fix="--machines '8xH100, 8xH200'")
    return machines


def _parse_machine(text: str) -> Machine:
    name, at, price = (part.strip() for part in text.partition("@"))
    if not at:
        return Machine(name, None)
    try:
        dollars = float(price.removeprefix("$"))
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < float("inf"):
        raise SpecError("the price of a machine is not a positive number.", got=text, fix=f"{name}@2.5")
    return Machine(name, dollars)


def plan_machines(
    machines: Sequence[Machine],
    build: Callable[[str], PlanRequest],
    *,
    budget: Callable[[Hardware, float | None], TrainingBudget | None],
) -> list[MachinePlan]:
    """Plans on each machine. A machine on which nothing fits has a reason instead of a plan.

    build: returns the question on the hardware of a name
    budget: returns the tokens at a price per hour on a hardware, if the user gave tokens

    Raises SpecError for a name that is no hardware.
    """
    return [_plan_machine(one, build, budget=budget) for one in machines]


def _plan_machine(
    machine: Machine,
    build: Callable[[str], PlanRequest],
    *,
    budget: Callable[[Hardware, float | None], TrainingBudget | None],
) -> MachinePlan:
    question = None
    try:
        question = build(machine.name)
        best = fastest_plan(question)
    except PlanError as error:
        return MachinePlan(machine, question, reason=" ".join(str(error).split()))
    return MachinePlan(machine, question, best, budget(question.hardware, machine.price_per_hour))


def show_machines(plans: Sequence[MachinePlan]) -> None:
    """Prints a table with a row for each machine, then what the figures rest on, and why nothing fits."""
    question = next((one.question for one in plans if one.question is not None), None)
    if question is not None:
        show_labelled_lines([("model", question.model_summary), ("", "")])
    columns = _budget_columns(plans)
    header = ("", "tokens/s", "per rank", "MFU", "memory", "of", *columns, "plan")
    show_table(header, [_row(one, columns) for one in plans])
    show_labelled_lines([("", ""), *_notes(plans)])


def machines_record(plans: Sequence[MachinePlan]) -> list[dict[str, object]]:
    """Returns the rows as JSON values."""
    return [_record(one) for one in plans]


def _record(one: MachinePlan) -> dict[str, object]:
    record: dict[str, object] = {"machine": one.machine.name, "reason": one.reason or None}
    if one.plan is None or one.question is None:
        return record
    prediction, hardware = require_prediction(one.plan), one.question.hardware
    certainty = certainty_of(one.question.spec, hardware)
    record |= {
        "ranks": one.plan.world_size,
        "source": hardware.source,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "bytes_per_rank": prediction.required_device_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "certainty": certainty and certainty._asdict(),
    }
    if one.budget is not None:
        record["budget"] = one.budget.record(one.plan, prediction)
    return record | {"plan": one.plan.model_dump(mode="json")}


def _budget_columns(plans: Sequence[MachinePlan]) -> tuple[str, ...]:
    budgets = [one.budget for one in plans if one.budget is not None]
    known = {
        "time": bool(budgets),
        "dollars": any(budget.price_per_hour for budget in budgets),
    }
    return tuple(name for name, shown in known.items() if shown)


def _row(one: MachinePlan, columns: Sequence[str]) -> tuple[str, ...]:
    if one.plan is None:
        return (one.machine.name, *("-" * (5 + len(columns))), "nothing fits")
    prediction = require_prediction(one.plan)
    cells = dict.fromkeys(columns, "-")
    if one.budget is not None:
        dollars = one.budget.cost_dollars(one.plan, prediction)
        cells["time"] = format_duration(one.budget.training_seconds(prediction))
        cells |= {"dollars": format_dollars(dollars)} if dollars is not None else {}
    return (
        one.machine.name,
        format_count(prediction.tokens_per_second),
        format_count(prediction.tokens_per_second / one.plan.world_size),
        "-" if prediction.mfu is None else f"{100 * prediction.mfu:.1f} %",
        format_bytes(prediction.required_device_bytes),
        format_bytes(prediction.capacity_bytes),
        *cells.values(),
        f"{one.plan.strategy} {one.plan.microbatch}×{one.plan.accumulation} "
        + recompute_text(one.plan.run).removesuffix(" block"),
    )


def _notes(plans: Sequence[MachinePlan]) -> Iterator[tuple[str, str]]:
    yield from _best_rows(plans)
    for one in plans:
        if one.plan is None or one.question is None:
            yield one.machine.name, one.reason
            continue
        hardware, tokens = one.question.hardware, format_count(one.plan.run.tokens_per_step)
        tier = one.plan.run.offload.tier
        offload = "" if tier == "none" else f", offload {tier}"
        yield one.machine.name, f"{mesh_text(one.plan)}{offload}, {tokens} tokens a step"
        certainty = certainty_of(one.question.spec, hardware)
        if certainty is not None:
            yield "", certainty.text
        yield "", _rates_text(hardware)
    yield "plan", "strategy, sequences of a microbatch × microbatches of a step, recompute"


def _rates_text(hardware: Hardware) -> str:
    if hardware.calibration != "none":
        return "rates measured on such a machine"
    entry = find_catalog_entry_of_chip(hardware.chip)
    runs = entry.matmul_runs_of if entry is not None else ""
    if not runs:
        return "rates of the catalog, not fitted to any run"
    return f"rates fitted to runs of {runs}: runs of other years may differ by their software alone"


def _best_rows(plans: Sequence[MachinePlan]) -> Iterator[tuple[str, str]]:
    """Yields the machines that are fastest and cheapest, if there is a choice."""
    fitting = [(one, one.plan, require_prediction(one.plan)) for one in plans if one.plan is not None]
    if len(fitting) < 2:
        return
    yield "fastest", max(fitting, key=lambda row: row[2].tokens_per_second)[0].machine.name
    priced = [
        (cost, one.machine.name)
        for one, plan, prediction in fitting
        if one.budget is not None and (cost := one.budget.cost_dollars(plan, prediction)) is not None
    ]
    if len(priced) > 1:
        missing = len(fitting) - len(priced)
        yield "cheapest", min(priced)[1] + (f", of the {len(priced)} with a price" if missing else "")
