"""`fullshard plan`."""

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from fullshard.cli.options import AsJson, Overrides, complete_presets, require_positive_number
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from fullshard.planner.result import PlanRequest, PlanResult
    from fullshard.planner.target import PlanTarget
    from fullshard.report.plan import TrainingBudget
    from fullshard.spec.machine.hardware import Hardware
    from fullshard.spec.model import ModelSpec
    from fullshard.spec.plan import Plan
    from fullshard.spec.run import Run

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama3-8b, …), a config.json, a Hugging Face name that is cached here, a saved spec, "
        "or a run.toml; without it, the default run.",
        autocompletion=complete_presets,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="HARDWARE",
        help="4xH100, 32x8xH100 (32 nodes of 8), or a hardware.toml; without it, this machine.",
    ),
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Use this many ranks of the hardware.")]
DriveRate = Annotated[
    str | None,
    typer.Option(
        "--drive-rate",
        metavar="BYTES/S",
        help="Rate of the drive for one rank while all ranks use it, reads and writes together: 3.5G.",
    ),
]
Length = Annotated[
    int | None, typer.Option("--sequence-length", min=1, metavar="TOKENS", help="Tokens of a sequence: 8192.")
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens-per-step", metavar="TOKENS", help="Tokens of a step, over all ranks: 4M, 524288."),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision", metavar="MODE", help="fp32, bf16, bf16_reduce, bf16_pure, fp16, fp8, fp8_rowwise."
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="TOKENS", help="Show how long this many tokens take: 15T.")
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="DOLLARS", callback=require_positive_number, help="Price of one GPU hour."
    ),
]
Compare = Annotated[bool, typer.Option("--compare", help="Show all strategies side by side.")]
Ladder = Annotated[
    bool,
    typer.Option("--ladder", help="Show what each faster setting gains: compile, chunked loss, fp8, …"),
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="PLAN.json", help="Save the plan for fullshard train --plan.")
]
SaveSpec = Annotated[
    Path | None,
    typer.Option("--save-spec", metavar="SPEC.json", help="Save the model's spec, which MODEL accepts."),
]
SaveTrace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="TRACE.json",
        help="Save the planned step as a trace for https://ui.perfetto.dev; TRACE.json.gz is smaller.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Let --save, --save-spec and --trace replace any file.")]
Days = Annotated[
    float | None,
    typer.Option(
        "--fewest-gpus-in-days",
        metavar="DAYS",
        callback=require_positive_number,
        help="Find the fewest GPUs that process the --budget in this time.",
    ),
]
Largest = Annotated[
    Literal["microbatch", "sequence"] | None,
    typer.Option("--largest", help="Find the largest microbatch or sequence that fits."),
]
Scaling = Annotated[
    str | None,
    typer.Option("--scaling", metavar="RANKS", help="Show the speed on several numbers of ranks: 8,64,512."),
]
Machines = Annotated[
    str | None,
    typer.Option(
        "--machines",
        metavar="LIST",
        help="Plan on several machines side by side, with dollars per GPU hour: '8xH100@2.5, 8xH200@3.2'.",
    ),
]
_TABLES = ("--machines", "--ladder", "--scaling")
"""Options that print a table of several plans."""


class _Options(NamedTuple):
    """Options that hold for every machine that the command plans on. any_ranks: it asks for their number."""

    model: str | None
    pinned: tuple[str, ...]
    ranks: int | None
    drive_rate: str | None
    tokens_per_step: str | None
    any_ranks: bool
    budget: str | None
    price: float | None

    def ask(self, machine: str | None) -> "PlanRequest":
        """Returns the planning question on a machine; None is this one. Only a model itself needs torch."""
        from fullshard.planner.result import PlanRequest
        from fullshard.planner.target import choose_hardware, resolve_plan_target

        subject, pinned = resolve_plan_target(self.model), [*self.pinned]
        asked, ranks = subject.load_run(pinned), self.ranks
        _check_spec_fits_run(subject, asked)
        if (
            machine is not None
        ):  # ranks in a run.toml are of another machine; ranks set on the command line count
            ranks = ranks or (asked.run.ranks if _is_key_overridden("run.ranks", pinned) else None) or None
            pinned += ["run.ranks=0", "run.device=auto"]
            asked = subject.load_run(pinned)
        hardware = _with_drive_rate(choose_hardware(machine, ranks=ranks, run=asked), self.drive_rate)
        if asked.precision.mode == "auto":
            pinned.append(f"precision.mode={'bf16' if hardware.device == 'cuda' else 'fp32'}")
            asked = subject.load_run(pinned)
        sequences = self._choose_global_batch(subject, asked, hardware=hardware)
        if sequences is not None:
            asked = subject.load_run([*pinned, f"train.global_batch={sequences}"])
        for text in subject.differs:
            _print_note(f"planned as the reference decoder: {text}")
        return PlanRequest(subject, asked, hardware, spec=subject.describe_model(asked, hardware))

    def _choose_global_batch(
        self, subject: "PlanTarget", asked: "Run", *, hardware: "Hardware"
    ) -> int | None:
        """Returns the sequences of a step by the options or a choice of ours; None if the run has them."""
        from fullshard.planner.target import choose_global_batch, choose_global_batch_for_any_ranks
        from fullshard.quantities import parse_count

        tokens = parse_count(self.tokens_per_step) if self.tokens_per_step else None
        is_open = subject.chosen_here and not _is_key_overridden("train.global_batch", self.pinned)
        if self.tokens_per_step is None and not is_open:
            return None
        if self.any_ranks:
            sequences, note = choose_global_batch_for_any_ranks(asked, tokens=tokens)
        else:
            ranks = max(1, hardware.world_size // asked.sharding.ranks_per_sequence)
            sequences, note = choose_global_batch(
                asked, tokens=tokens, ranks=ranks, per_node=hardware.ranks_per_node
            )
        _print_note(note)
        return sequences

    def budget_on(self, hardware: "Hardware", price: float | None = None) -> "TrainingBudget | None":
        """Returns the tokens to train on, at the machine's own `price` or that of --price."""
        return _parse_training_budget(self.budget, price=price or self.price, hardware=hardware)


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
    save_spec: SaveSpec = None,
    trace: SaveTrace = None,
    force: Force = False,
    fewest_gpus_in_days: Days = None,
    largest: Largest = None,
    scaling: Scaling = None,
    machines: Machines = None,
) -> None:
    """Predict the memory and time of a run; choose what is fastest."""
    _check_outputs_replaceable(save, save_spec, trace=trace, force=force)
    settings = {"data.sequence_length": sequence_length, "precision.mode": precision}
    pinned = (*(overrides or ()), *(f"{key}={value}" for key, value in settings.items() if value))
    given = {"--machines": machines, "--ladder": ladder, "--scaling": scaling, "--compare": compare}
    given |= {"--save": save, "--trace": trace, "--largest": largest}
    if machines is not None:
        given |= {"--on": on, "--save-spec": save_spec, "--fewest-gpus-in-days": fewest_gpus_in_days}
    _check_tables_alone([name for name, value in given.items() if value], pinned)
    any_ranks = fewest_gpus_in_days is not None
    options = _Options(model, pinned, ranks, drive_rate, tokens_per_step, any_ranks, budget, price)
    if machines is not None:
        return _print_machines(machines, options, as_json=as_json)
    question = options.ask(on)
    _save(question.spec, save_spec)
    spend = options.budget_on(question.hardware)
    if fewest_gpus_in_days is not None:
        own = tokens_per_step is not None or _is_key_overridden("train.global_batch", pinned)
        question = _fewest_gpus(question, fewest_gpus_in_days, budget=spend, own_batch=own)
    if ladder:
        return _print_ladder(question, spend, as_json=as_json)
    if scaling is not None:
        return _print_scaling(question, scaling, as_json=as_json)
    answer = _choose_plan(question, largest)
    _save(answer.best, save)
    _save_trace(answer, trace)
    _print_note(None if save is None else question.plan_unusable_by_train_note(save))
    if as_json:
        return typer.echo(json.dumps(answer.json_record(spend), indent=2))
    return answer.print_page(spend, compare=compare)


def _choose_plan(question: "PlanRequest", largest: Literal["microbatch", "sequence"] | None) -> "PlanResult":
    from fullshard.planner.result import choose_fastest_plan, plan_largest_input

    return choose_fastest_plan(question) if largest is None else plan_largest_input(question, largest)


def _fewest_gpus(
    question: "PlanRequest", days: float, *, budget: "TrainingBudget | None", own_batch: bool
) -> "PlanRequest":
    """Returns `question` for the fewest GPUs that are fast enough. `own_batch`: the user gave the batch."""
    from fullshard.planner.result import fewest_gpus_request

    may_raise = question.subject.chosen_here and not own_batch
    return fewest_gpus_request(question, days=days, budget=budget, may_raise_batch=may_raise)


def _check_tables_alone(given: Sequence[str], pinned: Sequence[str]) -> None:
    """Raises SpecError for options that do not go with a table of several plans, and for pinned rungs.

    given: names of the options that the user gave
    """
    from fullshard.errors import SpecError
    from fullshard.planner.plan_tables import check_rungs_are_open

    table = next((name for name in _TABLES if name in given), None)
    others = [name for name in given if name != table]
    if table is not None and others:
        raise SpecError(
            f"{table} does not go with {', '.join(others)}.",
            why="it is a table of several plans",
            fix=f"these without {table}, for one plan",
        )
    if table == "--ladder":
        check_rungs_are_open(pinned)


def _print_machines(text: str, options: _Options, *, as_json: bool) -> None:
    from fullshard.planner.plan_tables import machines_record, parse_machines, plan_machines, show_machines

    plans = plan_machines(parse_machines(text), options.ask, budget=options.budget_on)
    if as_json:
        typer.echo(json.dumps({"machines": machines_record(plans)}, indent=2))
        return
    show_machines(plans)


def _print_scaling(question: "PlanRequest", counts: str, *, as_json: bool) -> None:
    from fullshard.planner.plan_tables import parse_rank_counts, plan_scaling, scaling_record, show_scaling

    points = plan_scaling(question, parse_rank_counts(counts))
    if as_json:
        typer.echo(json.dumps({"scaling": scaling_record(points)}, indent=2))
        return
    show_scaling(points)


def _print_ladder(question: "PlanRequest", budget: "TrainingBudget | None", *, as_json: bool) -> None:
    from fullshard.planner.plan_tables import plan_ladder
    from fullshard.report.ladder import ladder_record, show_ladder
    from fullshard.report.table import show_labelled_lines

    rungs = plan_ladder(question)
    if as_json:
        typer.echo(json.dumps({"ladder": ladder_record(rungs, budget)}, indent=2))
        return
    lines = [("model", question.model_summary), ("hardware", question.hardware_summary)]
    show_labelled_lines([*lines, ("  rates", question.hardware.source), ("", "")])
    show_ladder(rungs, budget=budget)


def _with_drive_rate(hardware: "Hardware", text: str | None) -> "Hardware":
    """Returns the hardware with a drive rate per rank, parsed from `text` in bytes/s: `6e9`, `3.5G`."""
    from fullshard.errors import SpecError
    from fullshard.quantities import format_count, parse_count

    if text is None:
        return hardware
    try:
        rate = float(text)
    except ValueError:
        rate = float(parse_count(text))
    if not 0 < rate < float("inf"):
        got = f"--drive-rate {text}"
        raise SpecError("the drive's rate is not a positive number.", got=got, fix="--drive-rate 3.5G")
    source = f"{hardware.source}; drive: {format_count(rate)}B/s per rank, from --drive-rate"
    return hardware.model_copy(update={"disk_bytes_per_second": rate, "source": source})


def _is_key_overridden(key: str, overrides: Sequence[str]) -> bool:
    return any(text.partition("=")[0].strip() == key for text in overrides)


def _check_spec_fits_run(subject: "PlanTarget", asked: "Run") -> None:
    """Raises SpecError if a saved spec was traced with another sequence length or precision."""
    from fullshard.errors import SpecError

    if subject.spec is None:
        return
    traced = subject.load_run(())
    for key, own, wanted in (
        ("sequences of", traced.data.sequence_length, asked.data.sequence_length),
        ("precision", traced.precision.mode, asked.precision.mode),
    ):
        if own != wanted:
            raise SpecError(
                f"{subject.name} was traced with {key} {own}.",
                got=f"{wanted}",
                why="what a microbatch computes and saves follows from it",
                fix="plan from the model itself, and save its spec again with --save-spec",
            )


def _parse_training_budget(
    tokens: str | None, *, price: float | None, hardware: "Hardware"
) -> "TrainingBudget | None":
    from fullshard.errors import SpecError
    from fullshard.quantities import parse_count
    from fullshard.report.plan import TrainingBudget

    if tokens is None:
        if price is not None:
            raise SpecError("--price needs a number of tokens.", got=f"--price {price:g}", fix="--budget 15T")
        return None
    per_hour = hardware.price_per_hour if price is None else price
    figures = {"tokens": parse_count(tokens), "price_per_hour": per_hour}
    return TrainingBudget.parse(figures, source="--budget and --price")


def _print_note(text: str | None) -> None:
    """Prints a note to standard error."""
    if text:
        print(f"note: {escape_control_characters(text)}", file=sys.stderr)


def _check_outputs_replaceable(
    plan: Path | None, spec: Path | None, *, trace: Path | None, force: bool
) -> None:
    """Raises SpecError if an output file must not be replaced, or has no directory.

    This is checked before anything is planned.
    """
    from fullshard.report.step_traces import check_is_trace
    from fullshard.spec.model import ModelSpec
    from fullshard.spec.plan import Plan
    from fullshard.system.targets import build_can_load_predicate, check_output_file

    for path, load in ((plan, Plan.load), (spec, ModelSpec.load), (trace, check_is_trace)):
        if path is not None:
            with _convert_write_errors(path):
                path.parent.stat()
            check_output_file(path, is_kind=build_can_load_predicate(load), force=force, streams=True)


def _save(value: "Plan | ModelSpec", path: Path | None) -> None:
    """Saves a plan or a spec to `path`, if one is given. Raises SpecError."""
    if path is not None:
        with _convert_write_errors(path):
            value.save(path)


def _save_trace(answer: "PlanResult", path: Path | None) -> None:
    """Saves the predicted step of the best plan to `path`, if one is given. Raises SpecError."""
    if path is None:
        return
    from fullshard.planner.predict.spans import predict_step_spans
    from fullshard.report.step_traces import save_trace

    question, plan = answer.question, answer.best
    spans = predict_step_spans(question.spec, plan, hardware=question.hardware)
    about = {
        "model": question.model_summary,
        "hardware": question.hardware_summary,
        "rates": question.hardware.source,
    }
    with _convert_write_errors(path):
        save_trace(path, {f"predicted: one of {plan.world_size:,} ranks": spans}, about=about)


@contextmanager
def _convert_write_errors(path: Path) -> Generator[None]:
    from fullshard.errors import SpecError

    try:
        yield
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix="another path") from error
