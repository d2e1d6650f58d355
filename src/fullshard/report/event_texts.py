"""A sentence about each event of a run."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from fullshard.quantities import count_text, format_bytes, format_seconds
from fullshard.report.table import percent_text
from fullshard.spec.records.event import RunEvent

Details: TypeAlias = Mapping[str, object]
_LARGEST = 1e30


def describe_event(event: RunEvent) -> str:
    """Returns what happened, as one sentence without its step."""
    if (describe := _SENTENCES.get(event.event)) is not None:
        return describe(event.details)
    known = ", ".join(f"{key} {value}" for key, value in event.details.items())
    return f"{event.event}: {known}" if known else event.event


def fault_text(details: Details) -> str:
    """Returns the rank and the first line of its error's message; that line alone if it names the rank."""
    rank, message = details.get("rank"), str(details.get("message", "")).split("\n", maxsplit=1)[0]
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message or 'an error'}"


def _describe_save(details: Details) -> str:
    seconds = _number_or_none(details.get("seconds"))
    stalled = _number_or_none(details.get("stalled_seconds"))
    took = "" if seconds is None else f" in {format_seconds(seconds)}"
    if stalled is not None and stalled != seconds:
        took += f", while training waited {format_seconds(stalled)}"
    return f"saved {details.get('path')}{took}"


def _describe_straggler(details: Details) -> str:
    seconds, share = _number_or_none(details.get("seconds")), _number_or_none(details.get("share"))
    per_step = f", {format_seconds(seconds)} per step" if seconds and seconds > 0 else ""
    per_step += f" ({percent_text(share, 1.0)})" if per_step and share else ""
    since = f" from step {first:,}" if isinstance(first := details.get("from_step"), int) else ""
    return f"rank {details.get('rank')} held the others up{since}: {details.get('cause')}{per_step}"


def _number_or_none(value: object) -> float | None:
    """Returns a number of a reasonable size, and None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _format_figure(value: object) -> str:
    number = _number_or_none(value)
    return "not finite" if number is None else f"{number:.4g}"


def _loss_and_gradient_norm_text(details: Details) -> str:
    loss, norm = _format_figure(details.get("loss")), _format_figure(details.get("grad_norm"))
    return f"loss {loss}, gradient norm {norm}"


def _ranks_text(details: Details, device: object = "") -> str:
    ranks = details.get("ranks")
    return count_text(ranks, f"{device} rank".strip()) if isinstance(ranks, int) else f"{ranks} ranks"


_SENTENCES: Mapping[str, Callable[[Details], str]] = {
    "start": lambda d: f"started on {_ranks_text(d, d.get('device'))} ({d.get('process')})",
    "resume": lambda d: f"resumed after this step, on {_ranks_text(d)}",
    "save": _describe_save,
    "save_failed": lambda d: f"NOT SAVED: {d.get('error')}",
    "skip": lambda d: f"left out, for it was not finite: {_loss_and_gradient_norm_text(d)}",
    "spike": lambda d: f"left out, for it stood out: {_loss_and_gradient_norm_text(d)}",
    "rollback": lambda d: f"rolled back to step {d.get('to_step')}: {_loss_and_gradient_norm_text(d)}",
    "straggler": _describe_straggler,
    "straggler_over": lambda d: f"rank {d.get('rank')} no longer did: {d.get('cause')}",
    "out_of_memory": lambda d: (
        f"rank {d.get('rank')} ran out of memory in {d.get('phase')}, while it held "
        f"{format_bytes(_number_or_none(d.get('held_bytes')) or 0)} of tensors; see {d.get('path')}"
    ),
    "fault": fault_text,
    "restart": lambda d: f"restart {d.get('count')} of {d.get('allowed')}",
    "signal": lambda d: f"the launcher received {d.get('signal')}",
    "stop": lambda d: f"stopped, {'and saved' if d.get('saved') else 'without a save'}",
    "end": lambda d: f"finished: loss {_format_figure(d.get('loss'))}",
}
