"""The state of a run in Prometheus' text format, for the textfile collector of node_exporter.

https://prometheus.io/docs/instrumenting/exposition_formats/. No label changes from step
to step, so the number of time series depends only on the number of ranks. The collector adds the time of the
file (`node_textfile_mtime_seconds`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from fullshard.errors import SpecError
from fullshard.spec.live_status import LiveStatus, RankStatus
from fullshard.system.files import open_regular_file

_BEGIN = b"# HELP fullshard_"
_MEMORY_SUFFIX = "_bytes"


class _Metric(NamedTuple):
    """A metric with its samples, which are (labels, value). Samples whose value is None are left out."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    samples: Iterable[tuple[Mapping[str, str], float | None]]


def check_prometheus_file(path: Path) -> None:
    """Raises SpecError if `path` exists and is not a file that a run wrote, which a run may replace."""
    begin = b""
    with suppress(OSError), open(path, "rb", opener=open_regular_file) as file:
        begin = file.read(len(_BEGIN))
    if begin not in (b"", _BEGIN):
        raise SpecError(
            f"log.prometheus = {str(path)!r} is a file of another program.",
            got=f"a file that does not begin with {_BEGIN.decode()}",
            why="a run replaces it",
            fix="another path",
        )


def prometheus_text(status: LiveStatus, *, run: str) -> str:
    """Returns the figures of `status` in Prometheus' text format. `run`: value of the label `run`."""
    lines: list[str] = []
    for metric in _list_metrics(status):
        name = f"fullshard_{metric.name}"
        known = [(labels, value) for labels, value in metric.samples if value is not None]
        if known:
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
        for labels, value in known:
            shown = ",".join(f'{key}="{_escape(one)}"' for key, one in {"run": run, **labels}.items())
            lines.append(f"{name}{{{shown}}} {value!r}")
    return "\n".join(lines) + "\n"


def _list_metrics(status: LiveStatus) -> Iterator[_Metric]:
    ranks, saved = status.ranks, status.saved_at
    gauges = {
        "running": int(status.running),
        "step": status.step,
        "steps": status.steps,
        "tokens_per_second": status.tokens_per_second,
        "seconds_left": status.seconds_left,
        "checkpoint_timestamp_seconds": None if saved is None else saved.timestamp(),
        "checkpoint_step": status.saved_step,
    }
    for name, text in _GAUGES.items():
        yield _Metric(name, "gauge", text, [({}, gauges.get(name, status.figures.get(name)))])
    counters = {
        "tokens_total": status.tokens,
        "trained_tokens_total": status.trained_tokens,
        "skipped_steps_total": status.skipped_steps,
        "restarts_total": status.attempt - 1,
        "step_seconds_sum": status.step_seconds,
        "step_seconds_count": status.counted_steps,
    }
    for name, text in _COUNTERS.items():
        yield _Metric(name, "counter", text, [({}, counters[name])])
    yield _Metric("memory_bytes", "gauge", "memory of a rank, by kind", _memory_samples(ranks))
    retries = [(_rank_labels(one), one.memory.get("allocator_retries")) for one in ranks]
    yield _Metric("allocator_retries_total", "counter", "times that the allocator freed its cache", retries)
    split = [(_rank_labels(one), one.memory.get("fragmentation")) for one in ranks]
    yield _Metric("memory_fragmentation", "gauge", "fraction of the reserved memory", split)
    waiting = [({"rank": str(one.rank), "cause": one.cause}, one.seconds) for one in status.stragglers]
    yield _Metric("straggler_seconds", "gauge", "time per step by which a rank is slower", waiting)


_GAUGES = {
    "running": "1 while the run trains, 0 after its end",
    "step": "last recorded step",
    "steps": "number of steps of the run",
    "tokens_per_second": "tokens/s of all ranks, over the recent steps",
    "seconds_left": "estimated time to the last step",
    "checkpoint_timestamp_seconds": "time of the newest checkpoint of this attempt",
    "checkpoint_step": "step of the newest checkpoint of this attempt",
    "loss": "training loss of the last step",
    "validation_loss": "validation loss, in steps that validate",
    "grad_norm": "gradient norm before clipping",
    "learning_rate": "learning rate of the last step",
    "mfu": "model FLOP utilisation, from 0 to 1",
    "data_seconds": "time of the last step in which rank 0 waited for data",
}
_COUNTERS = {
    "tokens_total": "computed tokens since the attempt began",
    "trained_tokens_total": "those of them whose label counts in the loss",
    "skipped_steps_total": "steps that updated nothing",
    "restarts_total": "attempts after the first",
    "step_seconds_sum": "seconds of all steps of the attempt",
    "step_seconds_count": "steps of the attempt",
}


def _memory_samples(ranks: Iterable[RankStatus]) -> Iterator[tuple[Mapping[str, str], float]]:
    for one in ranks:
        for name, value in one.memory.items():
            if name.endswith(_MEMORY_SUFFIX):
                yield {"kind": name.removesuffix(_MEMORY_SUFFIX), **_rank_labels(one)}, value


def _rank_labels(one: RankStatus) -> dict[str, str]:
    return {"rank": str(one.rank), "host": one.host}


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
