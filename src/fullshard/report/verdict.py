"""Sentences about a run: its events, how it ended, what it learnt, and how it compares with its plan."""

import math
from collections.abc import Iterator
from statistics import median

from fullshard.quantities import (
    count_text,
    format_bytes,
    format_count,
    format_seconds,
    format_trained_token_share,
)
from fullshard.report.event_texts import fault_text
from fullshard.report.plan import sharding_text
from fullshard.report.run_record import RunRecord
from fullshard.spec.prediction import CALIBRATION_MARKS

_AS_PLANNED_PERCENT = 2.0
_MOST_RESULTS = 6  # that the verdict shows
_RECENT_STEPS = 50  # last steps by which the speed of a run is judged


def verdict(run: RunRecord) -> str:
    """Returns sentences about the state of a run, its loss, its speed and its memory, beside the planned."""
    return " ".join([_state_sentence(run), *_loss_sentences(run), *_plan_sentences(run)])


def setup_and_incidents_text(run: RunRecord) -> str:
    """Returns sentences about mesh, attempts, faults, skipped steps, rollbacks, time and unreadable files."""
    sentences: list[str] = []
    if run.plan is not None:
        sentences.append(f"{sharding_text(run.plan)}, {run.plan.device}, {run.plan.precision.param} compute.")
    faults, again = len(run.events_of_kinds("fault")), count_repeated_steps(run)
    if run.attempts > 1 or faults:
        lost = f", {count_text(again, 'step')} done again" if again else ""
        sentences.append(f"{count_text(run.attempts, 'attempt')}, {count_text(faults, 'fault')}{lost}.")
    skipped, rollbacks = len(run.metrics.skipped_steps()), len(run.events_of_kinds("rollback"))
    sentences += [f"{count_text(skipped, 'step')} skipped."] if skipped else []
    sentences += [f"{count_text(rollbacks, 'rollback')}."] if rollbacks else []
    if run.seconds_in_attempts is not None and run.state != "running":
        sentences.append(f"{format_seconds(run.seconds_in_attempts)} in all.")
    sentences += [f"This version cannot read {name}, which is left out." for name in run.unreadable]
    return " ".join(sentences)


def count_repeated_steps(run: RunRecord) -> int:
    """Returns the number of recorded steps that resumes and rollbacks undid, and that were done again."""
    again, reached = 0, 0
    for event in run.events:
        if event.event == "resume" and event.step is not None:
            again += max(0, reached - event.step)
        elif event.event == "rollback" and isinstance(to := event.details.get("to_step"), int):
            again += max(0, (event.step or 1) - 1 - to)
        reached = event.step if event.step is not None and event.event != "resume" else reached
    return again


def find_measured_speed(run: RunRecord) -> float | None:
    """Returns the measured speed of the last attempt, or else the median of the last steps; or None."""
    if run.measurement is not None and run.measurement.tokens_per_second is not None:
        return run.measurement.tokens_per_second
    rates = run.metrics.values("tokens_per_second")[-_RECENT_STEPS:]
    return median(rates) if rates else None


def find_trained_token_share(run: RunRecord) -> float | None:
    """Returns trained tokens / tokens of the last attempt, or else of the last steps; None if not known."""
    if run.measurement is not None and run.measurement.pace.trained_share is not None:
        return run.measurement.pace.trained_share
    columns = (run.metrics.columns[name][-_RECENT_STEPS:] for name in ("trained_tokens", "tokens"))
    known = [pair for pair in zip(*columns, strict=True) if not any(map(math.isnan, pair))]
    tokens = sum(count for _, count in known)
    return sum(trained for trained, _ in known) / tokens if tokens else None


def _state_sentence(run: RunRecord) -> str:
    at = f"step {run.last_step:,}" + (f" of {run.planned_steps:,}" if run.planned_steps is not None else "")
    match run.state:
        case "finished":
            text = f"Finished all {count_text(run.last_step, 'step')}"
        case "running":
            text = f"Running: {at} is done{_time_left_text(run)}"
        case "restarting":
            text = f"Restarting after {at}: {_last_fault_text(run)}"
        case "failed":
            text = f"Failed after {at}: {_last_fault_text(run)}"
        case "stopped":
            stops = run.events_of_kinds("stop")
            saved = not stops or stops[-1].details.get("saved") is True
            then = ", and saved: fullshard train --resume continues it" if saved else ", at once: not saved"
            text = f"Stopped after {at}{then}"
        case "lost":
            seen = f"; its last event is of {run.events[-1].at:%Y-%m-%d %H:%M:%S} UTC" if run.events else ""
            text = f"Ended after {at} without recording why, as a killed run does{seen}"
    return f"{text}."


def _time_left_text(run: RunRecord) -> str:
    seconds = run.metrics.values("seconds")[-_RECENT_STEPS:]
    if run.planned_steps is None or not seconds or run.planned_steps <= run.last_step:
        return ""
    return f", about {format_seconds((run.planned_steps - run.last_step) * median(seconds))} left"


def _last_fault_text(run: RunRecord) -> str:
    faults = run.events_of_kinds("fault")
    return "its fault was not recorded" if not faults else fault_text(faults[-1].details).rstrip(".")


def _loss_sentences(run: RunRecord) -> Iterator[str]:
    validated, trained = run.metrics.points("validation_loss"), run.metrics.points("loss")
    if validated:
        step, lowest = min(validated, key=lambda point: point[1])
        best = "" if lowest == validated[-1][1] else f"; the lowest was {lowest:.4f}, after step {step:,.0f}"
        yield f"Validation loss {validated[-1][1]:.4f}{best}."
    elif trained:
        yield f"Training loss {trained[-1][1]:.4f}, {trained[0][1]:.4f} in the first step."
    if results := list(run.metrics.results.items()):
        shown = ", ".join(f"{name} {points[-1][1]:.4f}" for name, points in results[:_MOST_RESULTS])
        more = len(results) - _MOST_RESULTS
        yield f"Evaluations: {shown}{f' and {more} more' if more > 0 else ''}."


def _plan_sentences(run: RunRecord) -> Iterator[str]:
    rate, prediction = find_measured_speed(run), run.prediction
    if rate is not None:
        planned, mark = None, ""
        if prediction is not None and prediction.has_complete_step_time:
            mark = CALIBRATION_MARKS[prediction.calibration]
            planned = None if prediction.calibration == "none" else prediction.tokens_per_second
        share = format_trained_token_share(find_trained_token_share(run))
        beside = f"{f' ({mark})' if mark else ''}{f'; {share}' if share else ''}"
        yield f"{format_count(rate)} tokens/s{_deviation_from_plan(rate, planned)}{beside}."
    peaks = run.values_of_last_attempt("peak_bytes")
    if peaks:
        planned = None if prediction is None else prediction.memory.total
        yield f"{format_bytes(max(peaks))} of memory at the peak{_deviation_from_plan(max(peaks), planned)}."


def _deviation_from_plan(value: float, planned: float | None) -> str:
    """Returns `, 12 % more than planned`; an empty text without a plan."""
    if not planned:
        return ""
    more = 100 * (value / planned - 1)
    if abs(more) < _AS_PLANNED_PERCENT:
        return ", as planned"
    return f", {abs(more):,.0f} % {'more' if more > 0 else 'less'} than planned"
