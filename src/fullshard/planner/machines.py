"""A table of plans on several machines side by side, with dollars per GPU hour."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from fullshard.errors import PlanError, SpecError
from fullshard.planner.result import PlanRequest, search_degrees
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import require_best
from fullshard.quantities import format_bytes, format_count
from fullshard.report.plan import (
    TrainingBudget,
    format_amount,
    format_duration,
    recompute_text,
    sharding_text,
)
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.spec.machine.catalog import find_catalog_entry_of_chip
from fullshard.spec.machine.certainty import speed_deviation_of_plan
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan


class MachineRow(NamedTuple):
    """The best plan on a machine, or the reason why nothing fits.

    budget: number of tokens to train on and the machine's price; None without a plan, or without either
    question: what was planned; None if the batch cannot be divided over the machine's ranks
    """

    name: str
    plan: Plan | None = None
    reason: str = ""
    budget: TrainingBudget | None = None
    question: PlanRequest | None = None


def parse_machines(text: str) -> tuple[tuple[str, float | None], ...]:
    """Returns (name, dollars per GPU hour) of each machine of `8xH100@2.5, 4x8xH200`.

    Raises SpecError for an empty list, and for a price that is not a positive number.
    """
    machines = tuple(_parse_machine(part.strip()) for part in text.split(",") if part.strip())
    if not machines:
        raise SpecError("--machines names none.", got=repr(text), fix="--machines '8xH100, 8xH200'")
    return machines


def _parse_machine(text: str) -> tuple[str, float | None]:
    name, at, price = (part.strip() for part in text.partition("@"))
    if not at:
        return name, None
    try:
        dollars = float(price.removeprefix("$"))
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < float("inf"):
        raise SpecError("a price of --machines is not a positive number.", got=text, fix=f"{name}@2.5")
    return name, dollars


def plan_machines(
    machines: Sequence[tuple[str, float | None]],
    build_request: Callable[[str], PlanRequest],
    *,
    budget: Callable[[Hardware, float | None], TrainingBudget | None],
) -> list[MachineRow]:
    """Returns a row for each (name, price per hour). Where nothing fits, it has a reason instead of a plan.

    build_request: returns the planning question for the machine of this name
    budget: returns the training budget for (hardware, dollars per GPU hour)

    Raises SpecError for an unknown name.
    """
    rows: list[MachineRow] = []
    for name, price in machines:
        question = None
        try:
            question = build_request(name)
            _, spec, found = search_degrees(question, only_best=True)
            question = replace(question, described=spec)
            best = require_best(found, spec=spec, hardware=question.hardware, run=question.asked)
        except PlanError as error:
            rows.append(MachineRow(name, reason=" ".join(str(error).split()), question=question))
        else:
            rows.append(MachineRow(name, best, budget=budget(question.hardware, price), question=question))
    return rows


def show_machines(rows: Sequence[MachineRow]) -> None:
    """Prints a table with a row for each machine, what the figures rest on, and why nothing fits."""
    question = next((row.question for row in rows if row.question and row.question.described), None)
    if question is not None:
        show_labelled_lines([("model", question.model_summary), ("", "")])
    header = ("", "tokens/s", "per rank", "MFU", "memory", *_budget_columns(rows))
    show_table(header, list(_iterate_rows_of_cells(rows)))
    show_labelled_lines([("", ""), *chain.from_iterable(map(_machine_notes, rows))])


def _iterate_rows_of_cells(rows: Sequence[MachineRow]) -> Iterator[tuple[str, ...]]:
    columns = _budget_columns(rows)
    for row in rows:
        if row.plan is None:
            yield (row.name, *("-" * (4 + len(columns))))
            continue
        prediction, cells = require_prediction(row.plan), dict.fromkeys(columns, "-") | _budget_cells(row)
        yield (
            row.name,
            format_count(prediction.tokens_per_second),
            format_count(prediction.tokens_per_second / row.plan.world_size),
            "-" if prediction.mfu is None else f"{100 * prediction.mfu:.1f} %",
            format_bytes(prediction.required_device_bytes),
            *cells.values(),
        )


def _budget_columns(rows: Sequence[MachineRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in _budget_cells(row)))


def _budget_cells(row: MachineRow) -> dict[str, str]:
    """Returns time and dollars for the tokens, or without tokens, dollars for a billion, where known."""
    if row.plan is None or row.budget is None:
        return {}
    prediction, budget = require_prediction(row.plan), row.budget
    record = budget.json_record(row.plan, prediction)
    seconds, cost = record["seconds"], record["dollars"]
    each = None if budget.tokens else record["dollars_per_billion_tokens"]
    dollars = {name: format_amount(one) for name, one in (("dollars", cost), ("$ per 1B", each)) if one}
    return ({"time": format_duration(seconds)} if seconds else {}) | dollars


def machine_record(row: MachineRow) -> Mapping[str, object]:
    """Returns a row as JSON values."""
    if row.plan is None or row.question is None:
        return {"machine": row.name, "reason": row.reason}
    prediction, hardware = require_prediction(row.plan), row.question.hardware
    certainty = speed_deviation_of_plan(row.question.spec, hardware, plan=row.plan)
    return {
        "machine": row.name,
        "reason": None,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "seconds_per_step": prediction.time.total,
        "bytes_per_rank": prediction.required_device_bytes,
        "ranks": row.plan.world_size,
        "source": hardware.source,
        "capacity_bytes": prediction.capacity_bytes,
        "certainty": certainty and certainty._asdict(),
        **({} if row.budget is None else {"budget": row.budget.json_record(row.plan, prediction)}),
        "plan": row.plan.model_dump(mode="json"),
    }


def _machine_notes(row: MachineRow) -> Iterator[tuple[str, str]]:
    if row.plan is None or row.question is None:
        yield row.name, row.reason
        return
    tier, hardware = row.plan.run.offload.tier, row.question.hardware
    offload = "" if tier == "none" else f", offload {tier}"
    tokens = format_count(row.plan.run.tokens_per_step)
    batch = f"microbatch {row.plan.microbatch} × {row.plan.accumulation}, {tokens} tokens a step"
    rest = f"recompute {recompute_text(row.plan.run)}, {format_bytes(hardware.device_bytes_limit)} usable"
    yield row.name, f"{sharding_text(row.plan)}{offload}, {batch}, {rest}"
    if (certainty := speed_deviation_of_plan(row.question.spec, hardware, plan=row.plan)) is not None:
        yield "", certainty.text
    entry = find_catalog_entry_of_chip(hardware.chip)
    if hardware.calibration != "none":
        yield "", "rates measured on such a machine"
    elif entry is None or not entry.matmul_runs_of:
        yield "", "rates of the catalog, not fitted to any run"
    else:
        runs = f"rates fitted to runs of {entry.matmul_runs_of}"
        yield "", f"{runs}: runs of other years may differ by their software alone"
