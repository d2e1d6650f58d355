"""`fullshard plan`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullshard.cli.options import AsJson, Overrides, complete_presets, require_positive_number

if TYPE_CHECKING:
    from fullshard.planner.result import PlanOptions

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama3-8b, …), a config.json, a Hugging Face name that is cached here, "
        "or a run.toml; without it, the default run.",
        autocompletion=complete_presets,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        metavar="HARDWARE",
        help="4xH100, 32x8xH100 (32 nodes of 8), or a hardware.toml; without it, this machine.",
    ),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="Use this many ranks of the hardware.")]
DriveRate = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES/S",
        help="Rate of the drive for one rank while all ranks use it, reads and writes together: 3.5G.",
    ),
]
Length = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens of a sequence: 8192.")]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="Tokens of a step, over all ranks: 4M, 524288."),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="fp32, bf16, bf16_reduce, bf16_pure, fp16, fp8, fp8_rowwise."),
]
BudgetOption = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Show how long this many tokens take: 15T.")
]
Price = Annotated[
    float | None,
    typer.Option(metavar="DOLLARS", callback=require_positive_number, help="Price of one GPU hour."),
]
Compare = Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")]
Ladder = Annotated[
    bool,
    typer.Option("--ladder", help="Show what each faster setting gains: compile, chunked loss, fp8, …"),
]
Save = Annotated[
    Path | None, typer.Option(metavar="PLAN.json", help="Save the plan for fullshard train --plan.")
]
Force = Annotated[bool, typer.Option("--force", help="Let --save replace any file.")]
Largest = Annotated[
    Literal["microbatch", "sequence"] | None,
    typer.Option(help="Find the largest microbatch or sequence that fits."),
]
Machines = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Plan on several machines side by side, with dollars per GPU hour: '8xH100@2.5, 8xH200@3.2'.",
    ),
]
_TABLES = ("--machines", "--ladder")
"""Options that print a table of several plans."""


def plan(  # signature: typer's, one parameter an option  # noqa: PLR0913
    *,
    model: Model = None,
    on: On = None,
    ranks: Ranks = None,
    drive_rate: DriveRate = None,
    sequence_length: Length = None,
    tokens_per_step: Tokens = None,
    precision: PrecisionOption = None,
    overrides: Overrides = None,
    budget: BudgetOption = None,
    price: Price = None,
    compare: Compare = False,
    ladder: Ladder = False,
    as_json: AsJson = False,
    save: Save = None,
    force: Force = False,
    largest: Largest = None,
    machines: Machines = None,
) -> None:
    """Predict the memory and time of a run; choose what is fastest."""
    from fullshard.planner.plan_tables import check_rungs_are_open
    from fullshard.planner.result import (
        PlanOptions,
        check_output_replaceable,
        choose_fastest_plan,
        plan_largest_input,
    )

    if save is not None:  # checked before anything is planned
        check_output_replaceable(save, force=force)
    settings = {"data.sequence_length": sequence_length, "precision.mode": precision}
    pinned = (*(overrides or ()), *(f"{key}={value}" for key, value in settings.items() if value))
    given = {"--machines": machines, "--ladder": ladder, "--compare": compare}
    given |= {"--save": save, "--largest": largest, "--on": machines and on}
    _check_tables_alone([name for name, value in given.items() if value])
    if ladder:
        check_rungs_are_open(pinned)
    options = PlanOptions(model, pinned, ranks, drive_rate, tokens_per_step, budget, price)
    if machines or ladder:
        return _print_table(options, on, machines=machines, as_json=as_json)
    question = options.ask(on)
    spend = options.budget_on(question.hardware)
    answer = choose_fastest_plan(question) if largest is None else plan_largest_input(question, largest)
    if save is not None:
        answer.save(save)
    if as_json:
        return typer.echo(json.dumps(answer.json_record(spend), indent=2))
    return answer.print_page(spend, compare=compare)


def _check_tables_alone(given: Sequence[str]) -> None:
    """Raises SpecError for options that do not go with a table of several plans. `given`: their names."""
    from fullshard.errors import SpecError

    table = next((name for name in _TABLES if name in given), None)
    others = [name for name in given if name != table]
    if table is not None and others:
        raise SpecError(
            f"{table} does not go with {', '.join(others)}.",
            why="it is a table of several plans",
            fix=f"these without {table}, for one plan",
        )


def _print_table(options: "PlanOptions", on: str | None, *, machines: str | None, as_json: bool) -> None:
    from fullshard.planner import plan_tables as tables

    if machines is not None:
        rows = tables.plan_machines(tables.parse_machines(machines), options.ask, budget=options.budget_on)
        table = tables.machines_table(rows)
    else:
        question = options.ask(on)
        rungs = tables.plan_ladder(question, options.budget_on(question.hardware))
        table = tables.ladder_table(rungs, question=question)
    if as_json:
        typer.echo(json.dumps({table.kind: table.record}, indent=2))
    else:
        table.show()
