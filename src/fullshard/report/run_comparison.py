"""Several runs side by side: their figures, and the settings in which they differ."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, cast

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.report.charts import INKS, short_names
from fullshard.report.markup import cell, escape, table
from fullshard.report.run_record import RunRecord
from fullshard.report.verdict import recent_tokens_per_second, recent_trained_share, repeated_steps
from fullshard.spec.run import Run

_OWN = "run.dir"  # differs between any two runs, and says nothing
_LAST_SHARE = 1 / 20  # part of the steps that the training loss of a run is the mean of


@dataclass(frozen=True)
class _Figure:
    """A row of the table of figures. `value` returns None if a run does not have the figure."""

    label: str
    value: Callable[[RunRecord], float | None]
    show: Callable[[float], str]
    best: Literal["lowest", "highest"] | None = None


def figures_table(runs: Sequence[RunRecord]) -> str:
    """Returns the table of figures, with a column for each run. The best figure of a row is bold."""
    rows = [["state", *(run.state for run in runs)]]
    for figure in _FIGURES:
        values = [figure.value(run) for run in runs]
        known = [value for value in values if value is not None]
        if not known:
            continue
        best = {"lowest": min, "highest": max}.get(figure.best or "")
        target = (
            figure.show(best(known)) if best is not None and len(set(map(figure.show, known))) > 1 else None
        )
        shown = ["–" if value is None else figure.show(value) for value in values]
        cells = [cell(escape(text), "best" if text == target else "") for text in shown]
        rows.append([figure.label, *cells])
    return _run_table(runs, rows, corner="")


def settings_table(runs: Sequence[RunRecord]) -> str:
    """Returns the table of the settings in which the runs differ, or a sentence without any."""
    plans = [run.plan for run in runs if run.plan is not None]
    if len(plans) < len(runs):
        without = ", ".join(
            name for run, name in zip(runs, short_names(runs), strict=True) if run.plan is None
        )
        return f"<p>Settings are not known for {escape(without)}: there is no plan."
    rows = [[escape(key), *map(escape, values)] for key, values in differing_settings([p.run for p in plans])]
    return _run_table(runs, rows, corner="setting") if rows else "<p>None: the runs have the same settings."


def _run_table(runs: Sequence[RunRecord], rows: list[list[str]], *, corner: str) -> str:
    """Returns a table with a column for each run, named in the colour of its curve."""
    names = [cell(escape(name), f"c{index % INKS}") for index, name in enumerate(short_names(runs))]
    head = [cell(f'<span class="dim">{escape(corner)}</span>', ""), *names]
    return f'<div class="scroll">{table([], [head, *rows])}</div>'


def _lowest_validation(run: RunRecord) -> float | None:
    return min(run.metrics.values("validation_loss"), default=None)


def _last_loss(run: RunRecord) -> float | None:
    losses = run.metrics.values("loss")
    return fmean(losses[-max(1, round(len(losses) * _LAST_SHARE)) :]) if losses else None


def _step_seconds(run: RunRecord) -> float | None:
    if run.measurement is not None and run.measurement.pace.step_seconds is not None:
        return run.measurement.pace.step_seconds
    seconds = run.metrics.values("seconds")
    return median(seconds) if seconds else None


def _error_of_plan(run: RunRecord) -> float | None:
    """Returns how much longer a step took than predicted, in percent."""
    prediction, seconds = run.prediction, _step_seconds(run)
    if (
        prediction is None
        or seconds is None
        or not prediction.has_complete_step_time
        or not prediction.time.total
    ):
        return None
    return 100 * (seconds / prediction.time.total - 1)


def _data_share(run: RunRecord) -> float | None:
    seconds, waited = sum(run.metrics.values("seconds")), sum(run.metrics.values("data_seconds"))
    return 100 * waited / seconds if seconds else None


def _peak_bytes(run: RunRecord) -> float | None:
    if run.measurement is not None and run.measurement.peak_bytes is not None:
        return run.measurement.peak_bytes.total
    return max(run.metrics.values("peak_bytes"), default=None)


def list_settings(run: Run) -> dict[str, str]:
    """Returns the text of every setting by its dotted key, as in `--set`."""
    return {key: text for key, text in _flatten(run.model_dump(mode="json"), "") if key != _OWN}


def changed_settings(run: Run) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of the settings that are not at their defaults."""
    defaults = list_settings(Run())
    found = list_settings(run).items()
    return [(key, text, defaults.get(key, "")) for key, text in found if text != defaults.get(key)]


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns (key, value of each run) of the settings in which the runs differ. Absent values are ""."""
    each = [list_settings(run) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    rows = [(key, [settings.get(key, "") for settings in each]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast(Mapping[str, Any], value).items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        yield key, value
    else:
        yield key, json.dumps(value)


_FIGURES = (
    _Figure("last step", lambda run: run.last_step, lambda value: f"{value:,.0f}"),
    _Figure("lowest validation loss", _lowest_validation, lambda value: f"{value:.4f}", "lowest"),
    _Figure("training loss, mean of the last 5 %", _last_loss, lambda value: f"{value:.4f}", "lowest"),
    _Figure("tokens/s", recent_tokens_per_second, format_count, "highest"),
    _Figure("tokens that count in the loss", recent_trained_share, lambda value: f"{100 * value:.1f} %"),
    _Figure("step", _step_seconds, format_seconds, "lowest"),
    _Figure("step, against the plan", _error_of_plan, lambda value: f"{value:+.0f} %"),
    _Figure(
        "MFU",
        lambda run: run.measurement and run.measurement.mfu,
        lambda value: f"{100 * value:.1f} %",
        "highest",
    ),
    _Figure("waiting for data", _data_share, lambda value: f"{value:.1f} %", "lowest"),
    _Figure("peak memory of a rank", _peak_bytes, format_bytes, "lowest"),
    _Figure("steps skipped", lambda run: len(run.metrics.skipped_steps()), lambda value: f"{value:,.0f}"),
    _Figure("attempts", lambda run: run.attempts, lambda value: f"{value:,.0f}"),
    _Figure("steps done again", repeated_steps, lambda value: f"{value:,.0f}"),
    _Figure("time, all attempts", lambda run: run.wall_seconds, format_seconds),
)
