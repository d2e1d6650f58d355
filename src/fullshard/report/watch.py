"""The state of a run for `fullshard watch`: as lines for a terminal, and as values for a program."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, median
from typing import Any

from rich.text import Text

from fullshard.quantities import format_bytes, format_count, format_seconds, format_trained_share
from fullshard.report.run_record import RunRecord
from fullshard.report.verdict import (
    RECENT_STEPS,
    describe_event,
    fault_text,
    recent_tokens_per_second,
    recent_trained_share,
)
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.live_status import LiveStatus, RankStatus
from fullshard.system.terminal import escape_to_single_line

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_COLUMNS = 40
_SHOWN_RANKS, _SHOWN_EVENTS = 8, 4
_BAR_COLUMNS = 20
# A running run is reported if it completes no step for this many usual step times, and this many seconds.
_QUIET_STEPS, _QUIET_SECONDS = 10, 20.0
_ENDED = ("finished", "stopped", "failed", "lost")
_STYLES = {"running": "bold green", "finished": "bold green", "failed": "bold red", "lost": "bold red"}
_HIDDEN_EVENTS = ("plan",)


@dataclass(frozen=True)
class WatchedRun:
    """A run at one moment.

    record: the records of its directory
    now: the moment
    last_step_at: when metrics.jsonl was last written; None if it does not exist
    """

    record: RunRecord
    now: datetime
    last_step_at: datetime | None

    @property
    def live(self) -> LiveStatus | None:
        return self.record.live

    @property
    def has_ended(self) -> bool:
        return self.record.state in _ENDED

    @property
    def step_seconds(self) -> float | None:
        """Median time of the last steps; None before the first."""
        recent = self.record.metrics.values("seconds")[-RECENT_STEPS:]
        return median(recent) if recent else None

    @property
    def tokens_per_second(self) -> float | None:
        if self.live is not None and not self.has_ended:
            return self.live.tokens_per_second
        return recent_tokens_per_second(self.record)

    @property
    def prediction(self) -> Prediction | None:
        return self.record.prediction

    @property
    def seconds_left(self) -> float | None:
        if self.has_ended or self.record.steps is None or self.step_seconds is None:
            return None
        if self.live is not None and self.live.seconds_left is not None:
            return self.live.seconds_left
        return (self.record.steps - self.record.last_step) * self.step_seconds

    @property
    def last_save(self) -> RunEvent | None:
        return next(iter(reversed(self.record.of_kind("save"))), None)

    @property
    def quiet_seconds(self) -> float | None:
        """Time since the last step, if it is unusually long for a run that is running; else None."""
        usual = self.step_seconds
        if self.record.state != "running" or self.last_step_at is None or usual is None:
            return None
        passed = (self.now - self.last_step_at).total_seconds()
        return passed if passed > max(_QUIET_SECONDS, _QUIET_STEPS * usual) else None

    def shown_ranks(self) -> Sequence[RankStatus]:
        """Returns the ranks to show: of many, stragglers, those behind, and those longest in their phase."""
        ranks = () if self.live is None or self.has_ended else self.live.ranks
        if len(ranks) <= _SHOWN_RANKS:
            return ranks
        held_up = {one.rank for one in self.live.stragglers} if self.live is not None else set[int]()
        order = sorted(ranks, key=lambda one: (one.rank not in held_up, one.step, -one.seconds_in_phase))
        return sorted(order[:_SHOWN_RANKS], key=lambda one: one.rank)


def watch_values(run: WatchedRun) -> dict[str, Any]:
    """Returns the state as JSON values."""
    record, save = run.record, run.last_save
    prediction = run.prediction
    return {
        "run": record.name,
        "state": record.state,
        "step": record.last_step,
        "steps": record.steps,
        "attempt": record.attempts,
        "figures": {name: _last(record, name) for name in record.metrics.columns},
        "step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
        "planned_tokens_per_second": None if prediction is None else prediction.tokens_per_second,
        "planned_memory_bytes": None if prediction is None else prediction.memory.total,
        "capacity_bytes": None if prediction is None else prediction.capacity_bytes,
        "seconds_left": run.seconds_left,
        "seconds_without_step": run.quiet_seconds,
        "saved_step": None if save is None else save.step,
        "seconds_since_save": None if save is None else (run.now - save.at).total_seconds(),
        "live": None if run.live is None else run.live.model_dump(mode="json"),
        "events": [_event_values(event) for event in _shown_events(record, count=20)],
    }


def watch_lines(run: WatchedRun) -> list[Text]:
    """Returns the state as lines for a terminal."""
    rows = [
        ("loss", _loss_line(run)),
        ("speed", _speed_line(run)),
        ("memory", _memory_line(run)),
        ("saved", _save_line(run)),
    ]
    lines = [_head_line(run)]
    if run.record.steps:
        lines.append(Text.assemble(("steps    ", "bold"), _bar(run.record.last_step / run.record.steps)))
    lines += [Text.assemble((f"{label:9}", "bold"), text) for label, text in rows if text]
    lines += _warning_lines(run)
    lines += _rank_lines(run)
    events = _shown_events(run.record, count=_SHOWN_EVENTS)
    if events:
        lines.append(Text("events", "bold"))
    for event in events:
        at = "" if event.step is None else f"step {event.step:,}: "
        text = escape_to_single_line(f"{at}{describe_event(event)}")
        lines.append(Text.assemble((f"  {event.at:%H:%M:%S} UTC  ", "dim"), text))
    return lines


def _head_line(run: WatchedRun) -> Text:
    record = run.record
    total = "" if record.steps is None else f" of {record.steps:,}"
    parts = [f"step {record.last_step:,}{total}"]
    parts += [f"attempt {record.attempts}"] if record.attempts > 1 else []
    parts += [f"{format_seconds(run.seconds_left)} left"] if run.seconds_left else []
    name = escape_to_single_line(record.name)
    state = (record.state, _STYLES.get(record.state, "bold yellow"))
    return Text.assemble((name, "bold"), "  ", state, f"  {', '.join(parts)}")


def _loss_line(run: WatchedRun) -> str:
    record = run.record
    loss = _last(record, "loss")
    if loss is None:
        return ""
    text = f"{loss:.4f}  {sparkline(record.metrics.values('loss'), columns=_CURVE_COLUMNS)}"
    if validated := record.metrics.points("validation_loss"):
        text += f"  validation {validated[-1][1]:.4f} (step {validated[-1][0]:,.0f})"
    norm, rate = _last(record, "grad_norm"), _last(record, "learning_rate")
    text += "" if norm is None else f"  norm {norm:.3g}"
    return text + ("" if rate is None else f"  lr {rate:.2e}")


def _speed_line(run: WatchedRun) -> str:
    rate, prediction = run.tokens_per_second, run.prediction
    if rate is None:
        return ""
    text = f"{format_count(rate)} tokens/s"
    if prediction is not None and prediction.has_complete_step_time:
        planned = prediction.tokens_per_second
        text += f", {100 * rate / planned:.0f} % of the {format_count(planned)} planned"
    share = format_trained_share(recent_trained_share(run.record))
    text += f"  {share}" if share else ""
    if run.step_seconds is not None:
        text += f"  step {format_seconds(run.step_seconds)}"
    mfu, data = _last(run.record, "mfu"), _last(run.record, "data_seconds")
    text += "" if mfu is None else f"  MFU {100 * mfu:.1f} %"
    if data is not None and run.step_seconds:
        text += f"  waiting for data {100 * data / run.step_seconds:.0f} %"
    return text


def _memory_line(run: WatchedRun) -> Text | str:
    """Returns the memory of the fullest rank beside the plan and the device, or of the process on the CPU."""
    prediction, metrics = run.prediction, run.record.metrics
    by_rank = [one.memory for one in run.live.ranks if one.memory] if run.live is not None else []

    def highest(name: str) -> float | None:
        values = [one[name] for one in by_rank if name in one] or metrics.values(name)[-RECENT_STEPS:]
        return max(values, default=None)

    peak, reserved = highest("peak_allocated_bytes"), highest("peak_reserved_bytes")
    measured = peak if peak is not None else max(metrics.values("peak_bytes"), default=None)
    planned = None if prediction is None else prediction.memory.total
    parts = ["" if measured is None else f"{format_bytes(measured)} at the peak of a step"]
    parts += ["" if planned is None else f"{format_bytes(planned)} planned"]
    if reserved is not None:
        split = 100 * (highest("fragmentation") or 0.0)
        parts.append(f"{format_bytes(reserved)} reserved, {split:.0f} % of it fragmented")
    if (retries := highest("allocator_retries")) is not None:
        parts.append(f"{retries:.0f} retries")
    if peak is None and (resident := highest("resident_bytes")) is not None:
        parts.append(f"{format_bytes(resident)} resident")
    text = Text(", ".join(part for part in parts if part))
    used = reserved or measured
    if prediction is not None and used is not None and peak is not None:
        text.append_text(Text.assemble("  ", _bar(used / prediction.capacity_bytes)))
        text.append(f" of {format_bytes(prediction.capacity_bytes)}")
    return text


def _save_line(run: WatchedRun) -> str:
    save, plan = run.last_save, run.record.plan
    every = 0 if plan is None else plan.run.checkpoint.every
    if save is None:
        text = "nothing yet"
    else:
        age = "" if run.has_ended else f", {format_seconds((run.now - save.at).total_seconds())} ago"
        text = f"step {save.step:,}{age}" if save.step is not None else f"{save.at:%H:%M:%S} UTC{age}"
    steps, last = run.record.steps, run.record.last_step
    if run.has_ended or steps is None:
        return text
    following = min((last // every + 1) * every, steps) if every else steps
    return f"{text}; the next at step {following:,}" if following > last else text


def _warning_lines(run: WatchedRun) -> Iterable[Text]:
    record = run.record
    if (quiet := run.quiet_seconds) is not None:
        usual = format_seconds(run.step_seconds or 0.0)
        yield Text(f"no step for {format_seconds(quiet)}; one takes {usual} usually", "bold yellow")
    for one in run.live.stragglers if run.live is not None and not run.has_ended else ():
        per_step = f", {format_seconds(one.seconds)} per step" if one.seconds else ""
        text = escape_to_single_line(f"rank {one.rank} holds the others up: {one.cause}{per_step}")
        yield Text(text, "bold yellow")
    if record.state in ("failed", "restarting") and (faults := record.of_kind("fault")):
        yield Text(escape_to_single_line(fault_text(faults[-1])), "bold red")
    if record.state == "lost":
        yield Text("it ended without recording why, as a killed run does", "bold red")


def _rank_lines(run: WatchedRun) -> Iterable[Text]:
    ranks = run.shown_ranks()
    if run.live is None or not ranks:
        return
    phases = ", ".join(f"{count} in {phase}" for phase, count in run.live.phases.items())
    hidden = "" if len(ranks) == run.live.world_size else f", {len(ranks)} shown"
    yield Text.assemble(
        ("ranks", "bold"), f"    {run.live.world_size:,}{hidden}: {escape_to_single_line(phases)}"
    )
    for one in ranks:
        place = escape_to_single_line(f"{one.host}:{one.process}")
        live = one.memory.get("peak_allocated_bytes", one.memory.get("host_bytes"))
        memory = "" if live is None else f"  {format_bytes(live)}"
        phase = escape_to_single_line(f"{one.phase} for {format_seconds(one.seconds_in_phase)}")
        yield Text(f"  {one.rank:>4}  {place:24} step {one.step:<8,} {phase:24}{memory}".rstrip())


def sparkline(values: Sequence[float], *, columns: int) -> str:
    """Returns the means of at most `columns` equal parts of `values` as a line of block characters."""
    if not values:
        return ""
    count = min(columns, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def _bar(share: float) -> Text:
    share = min(max(share, 0.0), 1.0)
    full = round(share * _BAR_COLUMNS)
    text = Text("█" * full, "green").append("░" * (_BAR_COLUMNS - full), "dim")
    return text.append(f" {100 * share:.1f} %", "none")


def _last(record: RunRecord, name: str) -> float | None:
    values = record.metrics.columns[name]
    return next((value for value in reversed(values[-RECENT_STEPS:]) if not math.isnan(value)), None)


def _shown_events(record: RunRecord, *, count: int) -> list[RunEvent]:
    return [event for event in record.events if event.event not in _HIDDEN_EVENTS][-count:]


def _event_values(event: RunEvent) -> Mapping[str, Any]:
    return {"text": describe_event(event), **event.model_dump(mode="json")}
