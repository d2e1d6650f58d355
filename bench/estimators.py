"""Other estimators on the models of a settings file, beside what was measured and what is predicted here.

    python bench/estimators.py SETTINGS.toml MEASURED.json      # needs accelerate and deepspeed installed

accelerate: `estimate-memory`'s own function for training with Adam, in bf16 or fp32 (it asks for nothing
else). DeepSpeed: `estimate_zero3_model_states_mem_needs` and, for zero1 and shard_grad_op,
`estimate_zero2_model_states_mem_needs`, with the true parameter counts, without offload. Both count model
states alone. As GiB of one GPU.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from runs import settings
from torch import nn

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Strategy


def accelerate_bytes(model: nn.Module, plan: Plan) -> float:
    """Returns its training column: the largest of its parts, for one GPU, whatever the ranks."""
    size, _ = calculate_maximum_sizes(model)
    parts = estimate_training_usage(size, "float32" if plan.precision.param == "fp32" else "bfloat16")
    return max(parts.values())


def deepspeed_bytes(model: nn.Module, plan: Plan) -> float:
    total = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    if plan.strategy is Strategy.FULL_SHARD:
        _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            total, largest, num_gpus_per_node=plan.world_size, cpu_offload=False, cpu_offload_params=False
        )
    else:
        _, on_gpu = estimate_zero2_model_states_mem_needs(
            total, num_gpus_per_node=plan.world_size, cpu_offload=False
        )
    return on_gpu


def main(path: str, measured: str) -> None:
    rows = {row["name"]: row for row in json.loads(Path(measured).read_text())}
    print("| setting | measured | accelerate | DeepSpeed | fullshard |\n|---|---|---|---|---|")
    for one in settings(path):
        row = rows[one["name"]]
        if "memory" not in row:
            continue
        run = Run.load(overrides=one["overrides"])
        device = "cuda" if run.run.device == "cuda" else "cpu"
        plan = Plan.from_run(run, world_size=row["world_size"], device=device)
        with torch.device("meta"):
            model = DecoderModel(run.decoder_config)
        ours = peak_bytes(describe(model, plan, loss=next_token_loss, device_type=device), plan).total
        seen = row["memory"]["bytes"]
        estimates = (accelerate_bytes(model, plan), deepspeed_bytes(model, plan), ours)
        columns = " | ".join(f"{b / 2**30:.2f} ({100 * (b / seen - 1):+.0f} %)" for b in estimates[:2])
        own = f"{ours / 2**30:.2f} ({100 * (ours / seen - 1):+.1f} %)"
        print(f"| {one['name']} | {seen / 2**30:.2f} | {columns} | {own} |")


if __name__ == "__main__":
    main(*sys.argv[1:3])
