"""Tables of several plans: machines side by side, and the ladder of settings.

The ladder has settings that make a step faster or smaller, each on top of the others. `fullshard plan
--ladder` predicts the rungs for any model and hardware, `python -m bench.gpu` measures them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from fullshard.errors import FullshardError, MissingExtraError, PlanError, SpecError, TraceError
from fullshard.planner.result import PlanRequest, fastest_plan
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import search
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
from fullshard.spec.run import Run

_SAME_SPEED, _SAME_BYTES = 5e-4, 1 << 20  # differences between rungs that are not shown


class PlanRow(NamedTuple):
    """The best plan of a case, or the reason why nothing fits.

    budget: the tokens to train on, at the price of the case; None if the user gave no tokens
    question: what was planned on a machine; None if the batch cannot be divided over its ranks
    """

    name: str
    plan: Plan | None = None
    reason: str = ""
    budget: TrainingBudget | None = None
    question: PlanRequest | None = None


class PlansTable(NamedTuple):
    """A table of several plans, as text and as JSON values.

    kind: key of the record in JSON
    above, below: (label, text) lines around the table
    """

    kind: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[tuple[str, str]]
    record: Sequence[Mapping[str, object]]
    above: Sequence[tuple[str, str]] = ()

    def show(self) -> None:
        """Prints the table with the lines around it."""
        if self.above:
            show_labelled_lines([*self.above, ("", "")])
        show_table(self.header, self.rows)
        show_labelled_lines([("", ""), *self.below])


def _cells(rows: Sequence[PlanRow], more: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each row. `more`: its cells before MFU and before the budget, which vary."""
    columns = _budget_columns(rows)
    for row, (before, after) in zip(rows, more, strict=True):
        if row.plan is None:
            yield (row.name, *("-" * (5 + len(columns))), "no plan")
            continue
        prediction, cells = require_prediction(row.plan), dict.fromkeys(columns, "-")
        if row.budget is not None:
            dollars = row.budget.cost_dollars(row.plan, prediction)
            cells["time"] = format_duration(row.budget.training_seconds(prediction))
            cells |= {"dollars": format_dollars(dollars)} if dollars is not None else {}
        yield (
            row.name,
            format_count(prediction.tokens_per_second),
            before,
            "-" if prediction.mfu is None else f"{100 * prediction.mfu:.1f} %",
            format_bytes(prediction.required_device_bytes),
            after,
            *cells.values(),
            f"{row.plan.strategy} {row.plan.microbatch}×{row.plan.accumulation} "
            + recompute_text(row.plan.run).removesuffix(" block"),
        )


_PLAN_NOTE = ("plan", "strategy, sequences of a microbatch × microbatches of a step, recompute")


def _budget_columns(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    budgets = [row.budget for row in rows if row.budget is not None]
    known = {"time": bool(budgets), "dollars": any(budget.price_per_hour for budget in budgets)}
    return tuple(name for name, shown in known.items() if shown)


def _record(row: PlanRow, figures: Mapping[str, object]) -> dict[str, object]:
    if row.plan is None:
        return {"reason": row.reason}
    prediction = require_prediction(row.plan)
    return {
        "reason": row.reason or None,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "seconds_per_step": prediction.time.total,
        "bytes_per_rank": prediction.required_device_bytes,
        **figures,
        **({} if row.budget is None else {"budget": row.budget.record(row.plan, prediction)}),
        "plan": row.plan.model_dump(mode="json"),
    }


# Machines #
def parse_machines(text: str) -> tuple[tuple[str, float | None], ...]:
    """Returns (name, dollars per GPU hour) of each machine of `8xH100@2.5, 4x8xH200`.

    Raises SpecError for an empty list or a price.
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
        raise SpecError("the price of a machine is not a positive number.", got=text, fix=f"{name}@2.5")
    return name, dollars


def plan_machines(
    machines: Sequence[tuple[str, float | None]],
    ask: Callable[[str], PlanRequest],
    *,
    budget: Callable[[Hardware, float | None], TrainingBudget | None],
) -> list[PlanRow]:
    """Returns a row for each (name, price per hour). Where nothing fits, it has a reason instead of a plan.

    ask: returns the question on the hardware of a name
    budget: returns the tokens at a price per hour on a hardware, if the user gave tokens

    Raises SpecError for a name that is no hardware.
    """
    rows: list[PlanRow] = []
    for name, price in machines:
        question = None
        try:
            question = ask(name)
            best = fastest_plan(question)
        except PlanError as error:
            rows.append(PlanRow(name, reason=" ".join(str(error).split()), question=question))
        else:
            rows.append(PlanRow(name, best, budget=budget(question.hardware, price), question=question))
    return rows


def machines_table(rows: Sequence[PlanRow]) -> PlansTable:
    """Returns a table with a row for each machine, what the figures rest on, and why nothing fits."""
    question = next((row.question for row in rows if row.question is not None), None)
    more, records = list[tuple[str, str]](), list[dict[str, object]]()
    for row in rows:
        figures: dict[str, object] = {}
        more.append(("", ""))
        if row.plan is not None and row.question is not None:
            prediction, hardware = require_prediction(row.plan), row.question.hardware
            certainty = certainty_of(row.question.spec, hardware)
            each = format_count(prediction.tokens_per_second / row.plan.world_size)
            more[-1] = each, format_bytes(prediction.capacity_bytes)
            figures = {"ranks": row.plan.world_size, "source": hardware.source}
            figures["capacity_bytes"] = prediction.capacity_bytes
            figures["certainty"] = certainty and certainty._asdict()
        records.append({"machine": row.name, **_record(row, figures)})
    return PlansTable(
        "machines",
        ("", "tokens/s", "per rank", "MFU", "memory", "of", *_budget_columns(rows), "plan"),
        list(_cells(rows, more)),
        [*_best_machines(rows), *chain.from_iterable(map(_machine_notes, rows)), _PLAN_NOTE],
        records,
        above=[("model", question.model_summary)] if question is not None else [],
    )


def _machine_notes(row: PlanRow) -> Iterator[tuple[str, str]]:
    if row.plan is None or row.question is None:
        yield row.name, row.reason
        return
    tier, hardware = row.plan.run.offload.tier, row.question.hardware
    offload = "" if tier == "none" else f", offload {tier}"
    tokens = format_count(row.plan.run.tokens_per_step)
    yield row.name, f"{mesh_text(row.plan)}{offload}, {tokens} tokens a step"
    if (certainty := certainty_of(row.question.spec, hardware)) is not None:
        yield "", certainty.text
    entry = find_catalog_entry_of_chip(hardware.chip)
    if hardware.calibration != "none":
        yield "", "rates measured on such a machine"
    elif entry is None or not entry.matmul_runs_of:
        yield "", "rates of the catalog, not fitted to any run"
    else:
        runs = f"rates fitted to runs of {entry.matmul_runs_of}"
        yield "", f"{runs}: runs of other years may differ by their software alone"


def _best_machines(rows: Sequence[PlanRow]) -> Iterator[tuple[str, str]]:
    """Yields the machines that are fastest and cheapest, if there is a choice."""
    fitting = [(row, row.plan, require_prediction(row.plan)) for row in rows if row.plan is not None]
    if len(fitting) < 2:
        return
    yield "fastest", max(fitting, key=lambda one: one[2].tokens_per_second)[0].name
    priced = [
        (cost, row.name)
        for row, plan, prediction in fitting
        if row.budget is not None and (cost := row.budget.cost_dollars(plan, prediction)) is not None
    ]
    if len(priced) > 1:
        missing = len(fitting) - len(priced)
        yield "cheapest", min(priced)[1] + (f", of the {len(priced)} with a price" if missing else "")


# The ladder #
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


def plan_ladder(question: PlanRequest, budget: TrainingBudget | None = None) -> list[PlanRow]:
    """Plans every rung: the fastest plan that fits with its settings and those of the rungs below it.

    A rung that the model, the hardware or this installation cannot climb has a reason instead of a plan, and
    the rungs above it do without.
    """
    rows, run, below = list[PlanRow](), question.asked, None
    for rung in LADDER:
        try:
            wanted = _run_on_rung(rung, run, hardware=question.hardware)
            spec = question.subject.describe_model(wanted, question.hardware)
            found = search(spec, question.hardware, wanted)
        except (SpecError, PlanError, TraceError, MissingExtraError) as error:
            rows.append(PlanRow(rung.name, reason=_reason_text(error), budget=budget))
            continue
        if found.best is None:
            assert found.closest is not None, "a search has a best plan or a closest"
            prediction = require_prediction(found.closest)
            over = format_bytes(max(0, prediction.required_device_bytes - prediction.capacity_bytes))
            reason = f"no plan fits, the closest needs {over} more per rank"
            rows.append(PlanRow(rung.name, reason=reason, budget=budget))
            continue
        same = below is not None and below.prediction == found.best.prediction
        rows.append(PlanRow(rung.name, found.best, rung.unpredicted if same else "", budget))
        run, below = wanted, found.best
    return rows


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


def _reason_text(error: FullshardError) -> str:
    """Returns the error as one line without its full stop."""
    return " ".join(error.what.split()).removesuffix(".") + (f" (got {error.got})" if error.got else "")


class RungGain(NamedTuple):
    """Effect of a rung: tokens/s as a factor, and more bytes needed on the fullest rank."""

    speed: float
    added_bytes: int

    @property
    def texts(self) -> tuple[str, str]:
        """Changes of tokens/s and of bytes, such as `+12.3 %` and `-11.74 GiB`; `-` if nothing changes."""
        speed = f"{100 * (self.speed - 1):+.1f} %" if abs(self.speed - 1) >= _SAME_SPEED else "-"
        size = f"{'-' if self.added_bytes < 0 else '+'}{format_bytes(abs(self.added_bytes))}"
        return speed, size if abs(self.added_bytes) >= _SAME_BYTES else "-"


def _gain(plan: Plan, below: Plan) -> RungGain:
    own, other = require_prediction(plan), require_prediction(below)
    added = own.required_device_bytes - other.required_device_bytes
    return RungGain(own.tokens_per_second / other.tokens_per_second, added)


def ladder_table(rows: Sequence[PlanRow], *, question: PlanRequest) -> PlansTable:
    """Returns a table of the rungs, each with its gain over the last one below it that has a plan."""
    gains, planned = list[RungGain | None](), list[PlanRow]()
    for row in rows:
        below = planned[-1].plan if planned else None
        gains.append(None if row.plan is None or below is None else _gain(row.plan, below))
        planned += [row] if row.plan is not None else []
    what = {rung.name: rung.what for rung in LADDER}
    notes = [(row.name, f"{what[row.name]}{': ' if row.reason else ''}{row.reason}") for row in rows]
    if len(planned) > 1 and (last := planned[-1].plan) and (first := planned[0].plan):
        speed, size = _gain(last, first).texts
        ends = f"from {planned[0].name} to {planned[-1].name}"
        notes.append(("in all", f"tokens/s {speed}, bytes per rank {size}, {ends}"))
    more = [gain.texts if gain is not None else ("", "") for gain in gains]
    records = [
        {"rung": row.name, "what": what[row.name], **_record(row, {"gain": gain and gain._asdict()})}
        for row, gain in zip(rows, gains, strict=True)
    ]
    header = ("", "tokens/s", "gain", "MFU", "per rank", "change", *_budget_columns(rows), "plan")
    return PlansTable(
        "ladder",
        header,
        list(_cells(rows, more)),
        [*notes, _PLAN_NOTE],
        records,
        above=[
            ("model", question.model_summary),
            ("hardware", question.hardware_summary),
            ("  rates", question.hardware.source),
        ],
    )
