"""Holds what was measured (bench/runs.py) against what is predicted from the same settings.

python bench/predictions.py SETTINGS.toml MEASURED.json
"""

import json
import statistics
import sys
from pathlib import Path

import torch
from runs import settings

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.search.candidates import add_workspace_bytes, allocator_reserve_bytes
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

CHIP = "H200"  # what settings for a GPU were measured on


def percent(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.2f} %"


def main(path: str, measured: str, hardware_path: str | None = None) -> None:
    hardware = Hardware.load(hardware_path) if hardware_path else None
    times: list[float] = []
    errors_reserved: list[float] = []
    rows = {row["name"]: row for row in json.loads(Path(measured).read_text())}
    errors: list[float] = []
    for one in settings(path):
        row = rows.get(one["name"])
        if row is None or "memory" not in row:
            print(one["name"], "-", row and row.get("error"))
            continue
        run = Run.load(overrides=one["overrides"])
        device = "cuda" if run.run.device == "cuda" else "cpu"
        plan = Plan.from_run(run, world_size=row["world_size"], device=device)
        with torch.device("meta"):
            model = DecoderModel(run.decoder_config)
        spec = describe(model, plan, loss=choose_loss(run, model), device_type=device)
        terms, seen = peak_bytes(spec, plan), row["memory"]
        reserved = ""
        if device == "cuda":
            chip = hardware_on(CHIP)
            terms = add_workspace_bytes(terms, chip)
            predicted = terms.total + allocator_reserve_bytes(chip, terms)
            errors_reserved.append(100 * abs(predicted / seen["reserved"] - 1))
            reserved = f"reserved {predicted / 2**20:.0f} of {seen['reserved'] / 2**20:.0f}"
            reserved += f" {percent(predicted, seen['reserved'])}"
        if not run.offload.offloads_optimizer or device == "cuda":  # else the device is the tier's host, too
            errors.append(terms.total / seen["bytes"] - 1)
        seconds = ""
        if hardware is not None:
            time = StepTimePredictor(spec, hardware).predict_time(plan)
            times.append(abs(time.total / row["seconds"] - 1))
            parts = " ".join(f"{n} {1000 * s:.0f}" for n, s in time.terms().items() if s > 0.0005)
            seconds = f", predicted {time.total:.4f} ({percent(time.total, row['seconds'])}): ms {parts}"
        print(
            f"{one['name']:45s} {terms.total / 2**20:10.1f} of {seen['bytes'] / 2**20:10.1f} MiB "
            f"{percent(terms.total, seen['bytes'])}  {reserved}  {row['seconds']:.4f} s{seconds}"
        )
    if times:
        print(f"seconds: median {100 * statistics.median(times):.1f} %, worst {100 * max(times):.1f} %")
    if errors_reserved:
        middle, worst = statistics.median(errors_reserved), max(errors_reserved)
        print(f"reserved: median {middle:.1f} %, worst {worst:.1f} %")
    sizes = [100 * abs(error) for error in errors]
    if sizes:
        print(f"{len(errors)} settings: median {statistics.median(sizes):.2f} %, worst {max(sizes):.2f} %")


if __name__ == "__main__":
    main(*sys.argv[1:4])
