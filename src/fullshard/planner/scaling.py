"""Scaling: the best plan on each of several numbers of ranks, with the same and with a growing batch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.errors import PlanError, SpecError
from fullshard.planner.result import PlanRequest
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.candidates import run_with_settings
from fullshard.planner.search.search import search
from fullshard.planner.target import hardware_with_ranks
from fullshard.quantities import format_count
from fullshard.report.plan import mesh_text, recompute_text
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan

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
