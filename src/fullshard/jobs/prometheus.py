"""The state of a run in Prometheus' text format, for the textfile collector of node_exporter.

https://prometheus.io/docs/instrumenting/exposition_formats/. No label has a value per step, so the number of
time series is that of the ranks. The collector adds the age of the file (`node_textfile_mtime_seconds`).
"""

from collections.abc import Iterable, Mapping

from fullshard.spec.live_status import LiveStatus, RankStatus

_Sample = tuple[Mapping[str, str], float | None]
_MEMORY_SUFFIX = "_bytes"


def prometheus_text(status: LiveStatus, *, run: str) -> str:
    """Returns the figures of `status` in Prometheus' text format. `run`: value of the label `run`."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, samples: Iterable[_Sample]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.extend((f"# HELP fullshard_{name} {text}", f"# TYPE fullshard_{name} {kind}"))
        for labels, value in known:
            shown = ",".join(f'{key}="{_escape(one)}"' for key, one in {"run": run, **labels}.items())
            lines.append(f"fullshard_{name}{{{shown}}} {value!r}")

    def add_gauge(name: str, text: str, value: float | None) -> None:
        add(name, "gauge", text, [({}, value)])

    figures = status.figures
    add_gauge("running", "1 while the run trains, 0 in its last state", int(status.running))
    add_gauge("step", "last recorded step", status.step)
    add_gauge("steps", "number of steps of the run", status.steps)
    for name, text in _GAUGES.items():
        add_gauge(name, text, figures.get(name))
    add_gauge("tokens_per_second", "tokens/s of all ranks, over the recent steps", status.tokens_per_second)
    add_gauge("seconds_left", "estimated time to the last step", status.seconds_left)
    saved = None if status.saved_at is None else status.saved_at.timestamp()
    add_gauge("checkpoint_timestamp_seconds", "time of the newest checkpoint of this attempt", saved)
    add_gauge("checkpoint_step", "step of the newest checkpoint of this attempt", status.saved_step)
    add("tokens_total", "counter", "tokens since the attempt began", [({}, status.tokens)])
    add("skipped_steps_total", "counter", "steps that updated nothing", [({}, status.skipped_steps)])
    add("restarts_total", "counter", "attempts after the first", [({}, status.attempt - 1)])
    add("step_seconds_sum", "counter", "seconds of all steps of the attempt", [({}, status.step_seconds)])
    add("step_seconds_count", "counter", "steps of the attempt", [({}, status.counted_steps)])
    add("memory_bytes", "gauge", "memory of a rank by kind", _memory_samples(status.ranks))
    retries = [(_rank_labels(one), one.memory.get("allocator_retries")) for one in status.ranks]
    add("allocator_retries_total", "counter", "times that the allocator freed its cache", retries)
    split = [(_rank_labels(one), one.memory.get("fragmentation")) for one in status.ranks]
    add("memory_fragmentation", "gauge", "free but split fraction of the reserved memory", split)
    waiting = [({"rank": str(one.rank), "cause": one.cause}, one.seconds) for one in status.stragglers]
    add("straggler_seconds", "gauge", "time per step by which a rank holds the others up", waiting)
    return "\n".join(lines) + "\n"


_GAUGES = {
    "loss": "training loss of the last step",
    "validation_loss": "validation loss, in steps that validate",
    "grad_norm": "gradient norm before clipping",
    "learning_rate": "learning rate of the last step",
    "mfu": "model FLOP utilisation, from 0 to 1",
    "data_seconds": "time of the last step in which rank 0 waited for data",
}


def _memory_samples(ranks: Iterable[RankStatus]) -> Iterable[_Sample]:
    for one in ranks:
        for name, value in one.memory.items():
            if name.endswith(_MEMORY_SUFFIX):
                yield {"kind": name.removesuffix(_MEMORY_SUFFIX), **_rank_labels(one)}, value


def _rank_labels(one: RankStatus) -> dict[str, str]:
    return {"rank": str(one.rank), "host": one.host}


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
