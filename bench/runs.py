"""Real steps of a decoder on these ranks, with what was measured of them.

    torchrun --nproc-per-node 2 bench/runs.py SETTINGS.toml OUT.json [ROUNDS]     # without torchrun: one rank

Each `[[setting]]` of the file has a `name` and `overrides` (as `--set` takes them). For each: the peak bytes
of a later step by part, and the median seconds of a few steps, written as a list of JSON objects by rank 0.
The prediction is made elsewhere, from the same file: measuring knows nothing of it. In several rounds all
settings are gone through again.

The steps of a round follow each other without a barrier, as in training; each is the mean over ranks. Other
load, also outside a virtual machine, slows its cores down for seconds or minutes: `seconds` is the lowest of
the rounds' medians, as in `fullshard calibrate`.
"""

import gc
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
from fullshard.models.loss import choose_loss
from fullshard.observe.memory import measure_peak_memory
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import close_offloaded_state, shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step


def settings(path: str | Path) -> list[dict[str, Any]]:
    """The settings of a file: its `common` overrides come before each one's own."""
    read = tomllib.loads(Path(path).read_text())
    common = read.get("common", [])
    return [{**one, "overrides": [*common, *one["overrides"]]} for one in read["setting"]]


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
        start = time.perf_counter()
        batches = microbatches(plan, device)
        run_step(state, plan, microbatches=batches, loss=loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    step()
    step()
    peaks: list[dict[str, Any]] = []
    for _ in range(2 if device.type == "cpu" else 1):
        with measure_peak_memory(device, model=model, optimizer=state.optimizer) as peak:
            step()
        parts = vars(peak.parts) if peak.parts else {}
        peaks.append({"bytes": peak.bytes, "reserved": peak.reserved_bytes, **parts})
    dist.barrier()
    times = [step() for _ in range(steps)]
    close_offloaded_state(model, plan=plan, finished=True)
    return {"memory": min(peaks, key=lambda one: one["bytes"]), "times": times}


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
                print(json.dumps(found[one["name"]]), flush=True)
                Path(out).write_text(json.dumps([*found.values()], indent=1) + "\n")


def joined(rows: list[dict[str, Any]], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The fullest rank's memory; the steps of this round and of those before."""
    if any("error" in row for row in rows):
        return next(row for row in rows if "error" in row)
    memory = max((row["memory"] for row in rows), key=lambda memory: memory["bytes"])
    if earlier is not None:
        memory = min(memory, earlier["memory"], key=lambda memory: memory["bytes"])
    times = [statistics.mean(step) for step in zip(*(row["times"] for row in rows), strict=True)]
    before = earlier or {"times": [], "medians": []}
    medians = [statistics.median(times), *before["medians"]]
    times += before["times"]
    return {
        **rows[0],
        "memory": memory,
        "times": times,
        "medians": medians,
        "spread": [min(times), max(times)],
        "seconds": min(medians),
    }


def _kind(ranks: RankInfo) -> Any:
    return "cuda" if ranks.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main(*sys.argv[1:4])
