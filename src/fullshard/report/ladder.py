"""Table of the ladder: the plan of each rung, and what the rung gains over the one below it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

from fullshard.quantities import format_bytes, format_count
from fullshard.report.plan import TrainingBudget, format_dollars, format_duration, recompute_text
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction

_SAME_SPEED, _SAME_BYTES = 5e-4, 1 << 20  # differences that are not shown


class PlannedRung(NamedTuple):
    """A rung of the ladder, planned.

    what: what the rung changes, in a few words
    plan: the fastest plan that fits, with its prediction; None if the rung cannot be climbed
    reason: why there is no plan, or why its prediction is that of the rung below; may be empty
    """

    name: str
    what: str
    plan: Plan | None = None
    reason: str = ""

    @property
    def prediction(self) -> Prediction | None:
        return None if self.plan is None else self.plan.prediction


class RungGain(NamedTuple):
    """Effect of a rung: tokens/s as a factor, and more bytes needed on the fullest rank."""

    speed: float
    added_bytes: int

    @property
    def speed_text(self) -> str:
        """Change of tokens/s, such as `+12.3 %`; `-` if nothing changes."""
        return f"{100 * (self.speed - 1):+.1f} %" if abs(self.speed - 1) >= _SAME_SPEED else "-"

    @property
    def bytes_text(self) -> str:
        """Change of the bytes needed, such as `-11.74 GiB`; `-` if nothing changes."""
        sign = "-" if self.added_bytes < 0 else "+"
        count = f"{sign}{format_bytes(abs(self.added_bytes))}"
        return count if abs(self.added_bytes) >= _SAME_BYTES else "-"


def rung_gains(rungs: Sequence[PlannedRung]) -> list[RungGain | None]:
    """Returns the gain of each rung over the last one below it that has a plan; None without either."""
    gains, below = list[RungGain | None](), None
    for rung in rungs:
        own = rung.prediction
        gains.append(_gain(own, below) if own is not None and below is not None else None)
        below = own or below
    return gains


def show_ladder(
    rungs: Sequence[PlannedRung], *, budget: TrainingBudget | None = None, file: TextIO | None = None
) -> None:
    """Prints the ladder to `file` (standard output by default): a table, then the reasons of rungs."""
    cost = [] if budget is None else ["time" if budget.price_per_hour is None else "dollars"]
    header = ["", "tokens/s", "gain", "MFU", "per rank", "change", *cost, "plan"]
    show_table(header, list(_rows(rungs, budget)), file=file)
    show_labelled_lines([("", ""), *_note_rows(rungs)], file=file)


def ladder_record(rungs: Sequence[PlannedRung], budget: TrainingBudget | None) -> list[dict[str, object]]:
    """Returns the ladder as JSON values, a rung after the other."""
    return [
        _rung_record(rung, gain, budget=budget) for rung, gain in zip(rungs, rung_gains(rungs), strict=True)
    ]


def _rung_record(
    rung: PlannedRung, gain: RungGain | None, *, budget: TrainingBudget | None
) -> dict[str, object]:
    record: dict[str, object] = {"rung": rung.name, "what": rung.what, "reason": rung.reason or None}
    plan, prediction = rung.plan, rung.prediction
    if plan is None or prediction is None:
        return record
    record |= {
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "seconds_per_step": prediction.time.total,
        "bytes_per_rank": prediction.required_device_bytes,
        "gain": gain._asdict() if gain is not None else None,
    }
    if budget is not None:
        record["budget"] = budget.record(plan, prediction)
    return record | {"plan": plan.model_dump(mode="json")}


def _rows(rungs: Sequence[PlannedRung], budget: TrainingBudget | None) -> Iterator[tuple[str, ...]]:
    for rung, gain in zip(rungs, rung_gains(rungs), strict=True):
        plan, prediction = rung.plan, rung.prediction
        if plan is None or prediction is None:
            yield (rung.name, *("-" * (6 if budget is None else 7)))
            continue
        yield (
            rung.name,
            format_count(prediction.tokens_per_second),
            gain.speed_text if gain is not None else "",
            f"{100 * prediction.mfu:.1f} %" if prediction.mfu is not None else "-",
            format_bytes(prediction.required_device_bytes),
            gain.bytes_text if gain is not None else "",
            *([] if budget is None else [_budget_text(budget, plan, prediction=prediction)]),
            f"{plan.strategy} {plan.microbatch}×{plan.accumulation} "
            + recompute_text(plan.run).removesuffix(" block"),
        )


def _note_rows(rungs: Sequence[PlannedRung]) -> Iterable[tuple[str, str]]:
    for rung in rungs:
        yield rung.name, f"{rung.what}{': ' if rung.reason else ''}{rung.reason}"
    planned = [(rung.name, rung.prediction) for rung in rungs if rung.prediction is not None]
    if len(planned) > 1:
        (lowest, first), (highest, last) = planned[0], planned[-1]
        gain = _gain(last, first)
        ends = f"from {lowest} to {highest}"
        yield "in all", f"tokens/s {gain.speed_text}, bytes per rank {gain.bytes_text}, {ends}"
    yield "plan", "strategy, sequences of a microbatch × microbatches of a step, recompute"


def _budget_text(budget: TrainingBudget, plan: Plan, *, prediction: Prediction) -> str:
    cost = budget.cost_dollars(plan, prediction)
    return format_duration(budget.training_seconds(prediction)) if cost is None else format_dollars(cost)


def _gain(own: Prediction, below: Prediction) -> RungGain:
    speed = own.tokens_per_second / below.tokens_per_second
    return RungGain(speed, own.required_device_bytes - below.required_device_bytes)
