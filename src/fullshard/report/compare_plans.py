"""Comparison of plans: one line each, the chosen one first."""

from collections.abc import Iterable
from typing import TextIO

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.report.grid import show_grid
from fullshard.report.plan import recompute_text
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction

HEADER = ("strategy", "mesh", "batch", "recompute", "bytes a rank", "step", "tokens/s", "MFU", "")


def show_comparison(chosen: Plan, others: Iterable[Plan], *, file: TextIO | None = None) -> None:
    """Prints one line per plan that has a prediction to `file` (standard output), `chosen` first."""
    show_grid(HEADER, comparison_rows(chosen, others), file=file)


def comparison_rows(chosen: Plan, others: Iterable[Plan]) -> list[tuple[str, ...]]:
    """Returns the cells: the chosen plan, other plans that fit, by speed, then the rest, by bytes."""
    assert chosen.prediction is not None, "the chosen plan is predicted"
    predicted = [(plan, plan.prediction) for plan in others if plan.prediction is not None and plan != chosen]
    predicted.sort(key=lambda one: _order(one[1]))
    rows = [(chosen, chosen.prediction), *predicted]
    return [_cells(plan, prediction, chosen=chosen.prediction) for plan, prediction in rows]


def _order(prediction: Prediction) -> tuple[int, float]:
    if prediction.fits:
        return (0, -prediction.tokens_per_second)
    return (1, prediction.needed_bytes)


def _cells(plan: Plan, prediction: Prediction, *, chosen: Prediction) -> tuple[str, ...]:
    reshard = f"→{plan.reshard_after_forward}" if type(plan.reshard_after_forward) is int else ""
    mfu = f"{100 * prediction.mfu:.1f} %" if prediction.mfu is not None else "-"
    return (
        str(plan.strategy),
        f"{plan.replicate_degree}×{plan.shard_degree}{reshard}",
        f"{plan.microbatch}×{plan.accumulation}",
        recompute_text(plan.run).removesuffix(" block"),
        format_bytes(prediction.needed_bytes),
        format_seconds(prediction.time.total),
        format_count(prediction.tokens_per_second),
        mfu,
        _verdict(prediction, chosen=chosen),
    )


def _verdict(prediction: Prediction, *, chosen: Prediction) -> str:
    """Compares a plan with the chosen one: the additional time per token, or what does not fit."""
    if not prediction.fits:
        return f"{format_bytes(prediction.needed_bytes - prediction.capacity_bytes)} over"
    if prediction is chosen:
        return "chosen"
    longer = 100 * (chosen.tokens_per_second / prediction.tokens_per_second - 1)
    return f"{longer:+.0f} % time" if abs(longer) >= 0.5 else "as fast"
