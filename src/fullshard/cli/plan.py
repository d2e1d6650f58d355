"""`fullshard plan`."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson, Overrides, complete_presets, require_positive_number
from fullshard.quantities import parse_count

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
Length = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens of a sequence: 8192.")]
Tokens = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        parser=partial(parse_count, source="--tokens-per-step"),
        help="Tokens of a step, over all ranks: 4M, 524288.",
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="fp32, bf16, bf16_reduce, bf16_pure, fp16, fp8, fp8_rowwise."),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        parser=partial(parse_count, source="--budget"),
        help="Show how long this many tokens take: 15T.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        metavar="DOLLARS",
        callback=require_positive_number,
        help="Price of one GPU hour: show dollars for the --budget, or else per hour and billion tokens.",
    ),
]
Days = Annotated[
    float | None,
    typer.Option(
        metavar="DAYS",
        callback=require_positive_number,
        help="Find the fewest GPUs, of nodes as --on has, that process the --budget in this time.",
    ),
]
List = Annotated[bool, typer.Option("--list", help="Show the presets and the chips, and exit.")]
Compare = Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")]
Save = Annotated[
    Path | None, typer.Option(metavar="PLAN.json", help="Save the plan for fullshard train --plan.")
]
Force = Annotated[bool, typer.Option("--force", help="Let --save replace any file.")]
Machines = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Plan on several machines side by side, with dollars per GPU hour: '8xH100@2.5, 8xH200@3.2'.",
    ),
]


def plan(  # signature: typer's, one parameter an option  # noqa: PLR0913
    *,
    model: Model = None,
    on: On = None,
    ranks: Ranks = None,
    sequence_length: Length = None,
    tokens_per_step: Tokens = None,
    precision: PrecisionOption = None,
    overrides: Overrides = None,
    budget: BudgetOption = None,
    price: Price = None,
    compare: Compare = False,
    as_json: AsJson = False,
    save: Save = None,
    force: Force = False,
    machines: Machines = None,
    fewest_gpus_in_days: Days = None,
    show_list: List = False,
) -> None:
    """Predict the memory and time of a run; choose what is fastest."""
    from fullshard.planner.fewest import plan_fewest_gpus
    from fullshard.planner.result import (
        PlanOptions,
        check_output_replaceable,
        search_and_explain,
    )

    if show_list:
        return _show_presets_and_chips()
    if save is not None:  # checked before anything is planned
        check_output_replaceable(save, force=force)
    settings = {"data.sequence_length": sequence_length, "precision.mode": precision}
    pinned = (*(overrides or ()), *(f"{key}={value}" for key, value in settings.items() if value is not None))
    given = {"--compare": compare, "--save": save, "--on": on}
    given |= {"--fewest-gpus-in-days": fewest_gpus_in_days}
    options = PlanOptions(model, pinned, ranks, tokens_per_step, budget, price)
    if machines is not None:
        return _plan_on_machines(options, machines, given=given, as_json=as_json)
    question = options.build_request(on, quiet=fewest_gpus_in_days is not None)
    spend = options.budget_on(question.hardware)
    if fewest_gpus_in_days is not None:
        answer = plan_fewest_gpus(partial(options.build_request, on), days=fewest_gpus_in_days, budget=spend)
    else:
        answer = search_and_explain(question)
    if save is not None:
        answer.save(save)
    if as_json:
        return typer.echo(json.dumps(answer.json_record(spend), indent=2))
    return answer.print_report(spend, compare=compare)


def _show_presets_and_chips() -> None:
    """Prints the names that MODEL may have, and machines of each chip that `--on` takes."""
    from fullshard.quantities import format_bytes
    from fullshard.report.table import show_labelled_lines
    from fullshard.spec.machine.catalog import read_catalog_chips
    from fullshard.spec.pretrained import read_presets

    show_labelled_lines([("MODEL", ""), *((one.name, one.repository) for one in read_presets()), ("", "")])
    chips = ((min((one.name, *one.aliases), key=len), one) for one in read_catalog_chips())
    nodes = [
        (f"{c.ranks_per_node}x{name}", f"{c.name}, {format_bytes(c.chip.memory_bytes)}") for name, c in chips
    ]
    show_labelled_lines([("--on", "a node"), *nodes])


def _plan_on_machines(
    options: "PlanOptions", machines: str, *, given: Mapping[str, object], as_json: bool
) -> None:
    """Prints the best plan on each machine. Raises SpecError for options in `given` that are set, too."""
    from fullshard.errors import SpecError
    from fullshard.planner.machines import machine_record, parse_machines, plan_machines, show_machines

    if others := [name for name, value in given.items() if value]:
        raise SpecError(
            f"--machines does not go with {', '.join(others)}.",
            why="it is a table of several plans",
            fix="these without --machines, for one plan",
        )
    rows = plan_machines(parse_machines(machines), options.build_request, budget=options.budget_on)
    if as_json:
        typer.echo(json.dumps({"machines": [machine_record(row) for row in rows]}, indent=2))
    else:
        show_machines(rows)
