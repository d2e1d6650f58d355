"""Real steps of a decoder on these ranks, with what was measured of them.

    torchrun --nproc-per-node 2 bench/runs.py SETTINGS.toml OUT.json [ROUNDS]     # without torchrun: one rank

Each `[[setting]]` of the file has a `name` and `overrides` (as `--set` takes them). For each: the peak bytes
of a later step by part, and the median seconds of a few steps, written as a list of JSON objects by rank 0.
The prediction is made elsewhere, from the same file: measuring knows nothing of it. In several rounds all
settings are gone through again.

Other load, also outside a virtual machine, slows its cores down for seconds or minutes. So every step has a
probe: the processor time of a fixed loop before and after it, on the slowest rank. `seconds` is the median of
the steps whose probes are within 15 % of the quickest of the whole job (`undisturbed` counts them). If there
are fewer than three, it is the lowest of the rounds' medians.
"""

import gc
import itertools
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.errors import FullshardError
from fullshard.models.decoder import DecoderModel
from fullshard.profiler.memory import measure_peak_memory
from fullshard.sharding.mesh import RankInfo, process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loss import choose_loss
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import close_offloaded_state, shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step


def settings(path: str | Path) -> list[dict[str, Any]]:
    """The settings of a file: its `common` overrides come before each one's own."""
    read = tomllib.loads(Path(path).read_text())
    common = read.get("common", [])
    return [{**one, "overrides": [*common, *one["overrides"]]} for one in read["setting"]]


def probe_seconds() -> float:
    """Processor time of a fixed loop."""
    started, total = time.process_time(), 0
    for number in range(100_000):
        total += number
    return time.process_time() - started


def microbatches(plan: Plan, device: torch.device) -> Iterator[dict[str, Tensor]]:
    shape = (plan.microbatch, plan.run.data.sequence_length)
    for _ in range(plan.accumulation):
        batch = {
            name: torch.randint(0, plan.run.decoder_config.vocabulary, shape, device=device)
            for name in ("tokens", "labels")
        }
        yield cut_sequences(batch, plan)


def measured(plan: Plan, ranks: RankInfo, *, steps: int) -> dict[str, Any]:
    """On every rank alike."""
    device = ranks.device
    with torch.device("meta"):
        model = DecoderModel(plan.run.decoder_config)
    model = shard(model, plan)
    loss = choose_loss(plan.run, model)
    state = TrainState(model, build_optimizer(model, plan))

    def step() -> float:
        probes.append(probe_seconds())
        dist.barrier()
        start = time.perf_counter()
        batches = microbatches(plan, device)
        run_step(state, plan, microbatches=batches, loss=loss, learning_rate=1e-3)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    probes: list[float] = []
    step()
    step()
    peaks: list[dict[str, Any]] = []
    for _ in range(2 if device.type == "cpu" else 1):
        with measure_peak_memory(device, model=model, optimizer=state.optimizer) as peak:
            step()
        parts = vars(peak.parts) if peak.parts else {}
        peaks.append(
            {"bytes": peak.bytes, "active": peak.active_bytes, "reserved": peak.reserved_bytes, **parts}
        )
    probes.clear()
    times = [step() for _ in range(steps)]
    probes.append(probe_seconds())
    close_offloaded_state(model, plan=plan, finished=True)
    around = [max(pair) for pair in itertools.pairwise(probes)]
    return {"memory": min(peaks, key=lambda one: one["bytes"]), "times": times, "probes": around}


def main(path: str, out: str, rounds: str = "1", *, steps: int = 5) -> None:
    found: dict[str, dict[str, Any]] = {}
    with process_group() as ranks:
        for one in settings(path) * int(rounds):
            result: dict[str, Any] = {"name": one["name"], "world_size": ranks.world_size}
            try:
                run = Run.load(overrides=one["overrides"])
                plan = Plan.from_run(run, world_size=ranks.world_size, device=_kind(ranks))
                result |= measured(plan, ranks, steps=steps)
            except (FullshardError, torch.OutOfMemoryError) as error:
                result["error"] = str(error).splitlines()[0]
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            rows = [result] * ranks.world_size
            dist.all_gather_object(rows, result)
            if ranks.rank == 0:
                found[one["name"]] = joined(rows, found.get(one["name"]))
                with_seconds([row for row in found.values() if "error" not in row])
                print(json.dumps(found[one["name"]]), flush=True)
                Path(out).write_text(json.dumps([*found.values()], indent=1) + "\n")


def joined(rows: list[dict[str, Any]], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The fullest rank's memory; the steps of this round and of those before."""
    if any("error" in row for row in rows):
        return next(row for row in rows if "error" in row)
    memory = max((row["memory"] for row in rows), key=lambda memory: memory["bytes"])
    if earlier is not None:
        memory = min(memory, earlier["memory"], key=lambda memory: memory["bytes"])
    times, probes = (
        [max(step) for step in zip(*(row[key] for row in rows), strict=True)] for key in ("times", "probes")
    )
    before = earlier or {"times": [], "probes": [], "medians": []}
    medians = [statistics.median(times), *before["medians"]]
    times, probes = times + before["times"], probes + before["probes"]
    return {
        **rows[0],
        "memory": memory,
        "times": times,
        "probes": probes,
        "medians": medians,
        "spread": [min(times), max(times)],
    }


def with_seconds(rows: list[dict[str, Any]]) -> None:
    """Sets `seconds` of all rows, since every round may have a quicker probe."""
    limit = 1.15 * min((probe for row in rows for probe in row["probes"]), default=0.0)
    for row in rows:
        steps = zip(row["times"], row["probes"], strict=True)
        undisturbed = [seconds for seconds, probe in steps if probe <= limit]
        row["undisturbed"] = len(undisturbed)
        row["seconds"] = statistics.median(undisturbed) if len(undisturbed) >= 3 else min(row["medians"])


def _kind(ranks: RankInfo) -> Any:
    return "cuda" if ranks.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main(*sys.argv[1:4])
