"""The charts of the page of `fullshard report --html`, and the values that its pointer reads from them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard.quantities import format_count
from fullshard.report.chart import Chart, Line
from fullshard.report.curves import Points, smooth_centred, thin_evenly
from fullshard.report.event_table import event_lanes
from fullshard.report.run_record import RunRecord

INKS = 6  # colours of `page.css`
# Points of the curves of all runs together, so that the page of several runs is not much larger.
_LOSS_COLUMNS, _COLUMNS, _READ_VALUES = 480, 200, 240
_LEAST_COLUMNS = 40
# Steps below which a curve is drawn as it is; and the fraction of a curve on either side of a smoothed point.
_SMOOTH_FROM, _REACH = 40, 1 / 80
_VALIDATION_INK = "c2"
_LONGEST_NAME = 17  # characters, for the margin of a chart


@dataclass(frozen=True)
class _SmallChart:
    """A figure of the steps with a chart of its own. `factor` multiplies its values."""

    key: str
    title: str
    show: Callable[[float], str]
    from_zero: bool = True
    factor: float = 1.0
    is_smoothed: bool = False


def draw_charts(runs: Sequence[RunRecord]) -> str:
    """Returns the charts of the runs over one axis of steps, and the values that the pointer reads."""
    firsts = [run.metrics.steps[0] for run in runs if run.metrics.steps]
    if not firsts:
        return ""
    first, last = min(firsts), max(run.last_step for run in runs)
    charts = [_loss_chart(runs, first=first, last=last), *_small_charts(runs, first=first, last=last)]
    drawn = [
        f'<div class="{"wide" if chart.key == "loss" else "small"}">{svg}</div>'
        for chart in charts
        if (svg := chart.draw())
    ]
    read = [(chart.key, line) for chart in charts for line in chart.lines if line.points and line.has_label]
    values = [_readable_values(key, line, count=len(runs)) for key, line in read]
    data = json.dumps({"first": first, "last": last, "lines": values}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # which could end the element
    return (
        f'<div class="charts">{"".join(drawn)}</div><script type="application/json" id="data">{data}</script>'
    )


def short_names(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the runs' names without the directories that all have in common, short enough for a label."""
    parts = [run.name.split("/") for run in runs]
    common = 0
    while len(runs) > 1 and all(len(one) > common + 1 and one[common] == parts[0][common] for one in parts):
        common += 1
    names = ["/".join(one[common:]) for one in parts]
    half = _LONGEST_NAME // 2
    return [name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}" for name in names]


def _loss_chart(runs: Sequence[RunRecord], *, first: float, last: float) -> Chart:
    lines = _lines(runs, "loss", label="train", columns=_LOSS_COLUMNS, is_smoothed=True)
    for line, run in zip(list(lines), runs, strict=True):
        validated = run.metrics.points("validation_loss")
        if len(runs) == 1:
            lines.append(Line("validation", validated, _VALIDATION_INK, is_dotted=True))
        else:  # the label of the run's curve is enough
            lines.append(Line("", validated, line.ink, is_dotted=True, has_label=False))
    title = "loss"
    if len(runs) == 1 and lines[0].smooth:
        title = "loss (thin: each step; thick: mean of the steps around it)"
    return Chart(
        key="loss",
        title=title,
        lines=lines,
        show=lambda value: f"{value:.4g}",
        steps=(first, last),
        lanes=event_lanes(runs[0]) if len(runs) == 1 else (),
        size=(950, 230),
    )


def _small_charts(runs: Sequence[RunRecord], *, first: float, last: float) -> list[Chart]:
    planned = runs[0].plan.prediction if len(runs) == 1 and runs[0].plan is not None else None
    rate = planned.tokens_per_second if planned is not None and planned.has_complete_step_time else None
    waits = [value for run in runs for value in run.metrics.values("data_seconds")]
    unit, factor = ("ms", 1e3) if max(waits, default=0.0) < 1.0 else ("s", 1.0)
    figures = (
        _SmallChart("tokens_per_second", "tokens/s of all ranks", format_count, is_smoothed=True),
        _SmallChart("grad_norm", "gradient norm, before clipping", _show_figure, from_zero=False),
        _SmallChart("learning_rate", "learning rate", _show_figure),
        _SmallChart("data_seconds", f"waiting for data, {unit} a step", _show_figure, factor=factor),
        _memory_chart(runs),
    )
    return [
        Chart(
            key=figure.key,
            title=figure.title,
            lines=_lines(
                runs, figure.key, columns=_COLUMNS, factor=figure.factor, is_smoothed=figure.is_smoothed
            ),
            show=figure.show,
            steps=(first, last),
            rule=(rate, f"planned {format_count(rate)}")
            if figure.key == "tokens_per_second" and rate
            else None,
            from_zero=figure.from_zero,
        )
        for figure in figures
    ]


def _memory_chart(runs: Sequence[RunRecord]) -> _SmallChart:
    """Returns the chart of rank 0's memory: of the device, if it has one, else live bytes of the host."""
    key, title = "host_bytes", "live host memory after each step on rank 0"
    if any(run.metrics.values("peak_allocated_bytes") for run in runs):
        key, title = "peak_allocated_bytes", "peak memory of each step on rank 0"
    most = max((value for run in runs for value in run.metrics.values(key)), default=0.0)
    unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    return _SmallChart(key, f"{title}, {unit}", _show_figure, factor=1 / size)


def _lines(
    runs: Sequence[RunRecord],
    key: str,
    *,
    columns: int,
    label: str = "",
    factor: float = 1.0,
    is_smoothed: bool = False,
) -> list[Line]:
    """Returns the curve of each run. `label` is for a run alone: of several, each has its name."""
    names = [label] if len(runs) == 1 else short_names(runs)
    columns = max(_LEAST_COLUMNS, columns // len(runs))
    lines: list[Line] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        points: Points = [(step, value * factor) for step, value in run.metrics.points(key)]
        smooth = None
        if is_smoothed and len(points) >= _SMOOTH_FROM:
            smooth = smooth_centred(points, reach=max(1, round(len(points) * _REACH)))
        if smooth is not None and len(runs) > 1:  # several thin curves would cover each other
            points, smooth = smooth, None
        lines.append(Line(name, points, f"c{index % INKS}", smooth=smooth, columns=columns))
    return lines


def _readable_values(key: str, line: Line, *, count: int) -> dict[str, object]:
    """Returns the steps and values of a curve that the page's script shows at the pointer."""
    points = thin_evenly(line.points, max(_LEAST_COLUMNS, _READ_VALUES // count))
    return {
        "key": key,
        "label": line.label,
        "steps": [step for step, _ in points],
        "values": [float(f"{value:.5g}") for _, value in points],
        "every": not line.is_dotted,
    }


def _show_figure(value: float) -> str:
    """Returns a figure in as few characters as an axis has room for: `0.0003` -> `3e-4`."""
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}"
