"""Tables of several plans: machines side by side, numbers of ranks, and the ladder of settings.

The ladder has settings that make a step faster or smaller, each on top of the others. `fullshard plan
--ladder` predicts the rungs for any model and hardware, `python -m bench.gpu` measures them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.errors import FullshardError, MissingExtraError, PlanError, SpecError, TraceError
from fullshard.planner.result import PlanRequest, fastest_plan
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.candidates import run_with_settings
from fullshard.planner.search.search import search
from fullshard.planner.target import hardware_with_ranks
from fullshard.quantities import format_bytes, format_count
from fullshard.report.ladder import PlannedRung
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
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


class Machine(NamedTuple):
    """A machine that the user names: `8xH100`, or `8xH100@2.5` with dollars per GPU hour."""

    name: str
    price_per_hour: float | None


class MachinePlan(NamedTuple):
    """The best plan on a machine, or the reason why no plan fits.

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


HEADER = ("ranks", "strong", "efficiency", "weak", "efficiency", "plan of the weak")


class ScalingPoint(NamedTuple):
    """The best plans on a number of ranks; None where nothing fits, or the batch cannot be divided.

    strong: with the batch of the question; weak: with as many sequences per rank as on the fewest ranks
    """

    ranks: int
    strong: Plan | None
    weak: Plan | None


def parse_rank_counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of `8,16,64`, ascending. Raises SpecError for anything else."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1:
        raise SpecError("--scaling takes numbers of ranks.", got=text, fix="--scaling 8,16,64,512")
    return counts


def plan_scaling(question: PlanRequest, counts: Sequence[int]) -> tuple[ScalingPoint, ...]:
    """Returns a point for each number of ranks. Raises SpecError for ranks that do not fill whole nodes."""
    run, fewest = question.asked, min(counts)
    each = max(1, run.train.global_batch // fewest)
    points: list[ScalingPoint] = []
    for count in counts:
        hardware = hardware_with_ranks(question.hardware, count)
        strong, weak = (
            _best_plan(question, hardware, batch=batch) for batch in (run.train.global_batch, each * count)
        )
        points.append(ScalingPoint(count, strong, weak))
    return tuple(points)


def _best_plan(question: PlanRequest, hardware: Hardware, *, batch: int) -> Plan | None:
    run = run_with_settings(question.asked, {"train": {"global_batch": batch}})
    try:
        return search(question.spec, hardware, run).best
    except PlanError:
        return None  # the batch cannot be divided over these ranks


def efficiencies(plans: Sequence[Plan | None]) -> list[float | None]:
    """Returns tokens/s per rank as fractions of those of the first plan that there is."""
    rates = [one and require_prediction(one).tokens_per_second / one.world_size for one in plans]
    first = next((rate for rate in rates if rate is not None), None)
    return [rate and first and rate / first for rate in rates]


def show_scaling(points: Sequence[ScalingPoint]) -> None:
    """Prints the points as a table, with tokens/s of all ranks."""
    show_table(HEADER, list(_rows(points)))
    notes = (
        "strong: the same tokens a step on all; weak: as many per rank as on the fewest",
        "tokens/s are of all ranks; efficiency: those per rank over those of the first row",
        "-: nothing fits, or the sequences of a step cannot be divided over these ranks",
    )
    show_labelled_lines([("", ""), *(("", note) for note in notes)])


def scaling_record(points: Sequence[ScalingPoint]) -> list[dict[str, object]]:
    """Returns the points as JSON values."""
    return [
        {
            "ranks": point.ranks,
            "strong": point.strong and point.strong.model_dump(mode="json"),
            "weak": point.weak and point.weak.model_dump(mode="json"),
        }
        for point in points
    ]


def _rows(points: Sequence[ScalingPoint]) -> Iterator[tuple[str, ...]]:
    kinds = [point.strong for point in points], [point.weak for point in points]
    parts = [efficiencies(plans) for plans in kinds]
    for index, point in enumerate(points):
        cells = [f"{point.ranks:,}"]
        for plan, part in zip((point.strong, point.weak), (one[index] for one in parts), strict=True):
            cells.append("-" if plan is None else format_count(require_prediction(plan).tokens_per_second))
            cells.append("-" if part is None else f"{100 * part:.0f} %")
        chosen = point.weak
        text = "-" if chosen is None else f"{mesh_text(chosen)}, recompute {recompute_text(chosen.run)}"
        yield (*cells, text)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    what: what changes, in a few words
    settings: `section.key=value`, which replace those of the rungs below
    expandable_segments: whether CUDA's allocator grows its segments from here on, instead of making new ones
    unpredicted: why the planner may predict no change
    """

    name: str
    what: str
    settings: tuple[str, ...] = ()
    expandable_segments: bool = False
    unpredicted: str = ""


LADDER = (
    Rung(
        *("eager", "a kernel per operation, whole logits"),
        settings=("run.compile=false", "train.loss_chunk=0"),
    ),
    Rung("compile", "torch.compile of each block", ("run.compile=true",)),
    Rung("chunked loss", "logits in chunks of rows", ("train.loss_chunk=auto",)),
    Rung(
        *("segments", "expandable segments of CUDA's allocator"),
        expandable_segments=True,
        unpredicted="no change is predicted, because the reserve was measured without them only",
    ),
    Rung("fp8", "matmuls of blocks in fp8", ("precision.mode=fp8",)),
)


def plan_ladder(question: PlanRequest) -> list[PlannedRung]:
    """Plans every rung: the fastest plan that fits with its settings and those of the rungs below it.

    A rung that the model, the hardware or this installation cannot climb has a reason instead of a plan, and
    the rungs above it do without. Raises SpecError if the question is about a saved spec.
    """
    subject, hardware = question.subject, question.hardware
    if subject.spec is not None:
        raise SpecError(
            "--ladder needs the model itself.",
            got=subject.name,
            why="a saved spec holds for the loss and the precision that it was traced with",
            fix="a preset, a config.json or a run.toml",
        )
    rungs, run, below = list[PlannedRung](), question.asked, None
    for rung in LADDER:
        try:
            wanted = _run_on_rung(rung, run, hardware=hardware)
            plan = _fastest_plan(subject.describe_model(wanted, hardware), hardware, run=wanted)
        except (SpecError, PlanError, TraceError, MissingExtraError) as error:
            rungs.append(PlannedRung(rung.name, rung.what, reason=_reason_text(error)))
            continue
        same = below is not None and below.prediction == plan.prediction
        rungs.append(PlannedRung(rung.name, rung.what, plan, rung.unpredicted if same else ""))
        run, below = wanted, plan
    return rungs


def check_rungs_are_open(overridden: Sequence[str]) -> None:
    """Raises SpecError if `--set` gives a setting that a rung changes. `overridden`: `section.key=value`."""
    keys = {text.partition("=")[0].strip() for text in overridden}
    for rung in LADDER:
        for setting in rung.settings:
            key = setting.partition("=")[0]
            if key in keys and key != "precision.mode":  # the rungs below fp8 keep the user's
                raise SpecError(
                    f"--ladder sets {key} itself.",
                    got=f"--set {key}",
                    why=f"its rung {rung.name!r} is {setting}",
                    fix=f"--ladder without --set {key}",
                )


def _run_on_rung(rung: Rung, run: Run, *, hardware: Hardware) -> Run:
    """Returns the run with a rung's settings. Raises SpecError if run or hardware cannot have them."""
    if rung.expandable_segments and hardware.device == "cpu":
        raise SpecError("expandable segments are of CUDA's allocator, and these ranks are on the CPU.")
    wanted = run.with_overrides(rung.settings)
    if wanted.precision.mode.startswith("fp8") and "fp8" not in hardware.chip.flops_per_second:
        raise SpecError(f"the catalog has no fp8 matmuls of {hardware.chip.name}.")
    return wanted


def _fastest_plan(spec: ModelSpec, hardware: Hardware, *, run: Run) -> Plan:
    """Returns the fastest plan that fits. Raises PlanError, without looking for changes that would fit."""
    found = search(spec, hardware, run)
    if found.best is not None:
        return found.best
    assert found.closest is not None, "a search that considered something has a best plan or a closest"
    prediction = require_prediction(found.closest)
    over = prediction.required_device_bytes - prediction.capacity_bytes
    raise PlanError(f"no plan fits, the closest needs {format_bytes(max(0, over))} more per rank.")


def _reason_text(error: FullshardError) -> str:
    """Returns the error as one line without its full stop."""
    return " ".join(error.what.split()).removesuffix(".") + (f" (got {error.got})" if error.got else "")
