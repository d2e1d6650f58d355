"""How long planning takes: Llama 405B on 2,048 nodes of 8 H100.

taskset -c 0 python bench/planning.py
"""

import statistics
import time

import torch

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.search.search import predict, search
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.run import Run

SIZES = "vocabulary=128256 d_model=16384 layers=126 heads=128 kv_heads=8 d_ff=53248 max_sequence=8192"


def main() -> None:
    torch.set_num_threads(1)
    batch = ["data.sequence_length=8192", "train.global_batch=65536", "precision.mode=bf16"]
    run = Run.load(overrides=[*(f"model.{one}" for one in SIZES.split()), *batch, "run.compile=auto"])
    start = time.perf_counter()
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    spec = describe(model, run, loss=next_token_loss, device_type="cuda")
    print(f"described {spec.numel / 1e9:.0f}B parameters in {time.perf_counter() - start:.2f} s")
    hardware = hardware_on("2048x8xH100")
    seconds: list[float] = []
    for _ in range(5):
        spec.derived_value_cache.clear()
        start = time.perf_counter()
        found = search(spec, hardware, run)
        seconds.append(time.perf_counter() - start)
    print(f"searched {found.considered} candidates in {statistics.median(seconds):.2f} s (5 times,", end=" ")
    print(f"{min(seconds):.2f} to {max(seconds):.2f}), of which {found.predicted} were predicted in full")
    plan = found.best or found.closest
    assert plan is not None, "something is best or closest"
    single: list[float] = []
    for _ in range(9):
        spec.derived_value_cache.clear()
        start = time.perf_counter()
        predict(spec, plan, hardware)
        single.append(time.perf_counter() - start)
    print(f"one prediction, from nothing: {1000 * statistics.median(single):.1f} ms", end=" ")
    print(f"(9 times, {1000 * min(single):.1f} to {1000 * max(single):.1f})")


if __name__ == "__main__":
    main()
