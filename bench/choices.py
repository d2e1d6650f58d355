"""Prints thirty plans with a judgement of each, as a table (bench/results/*-choices.md).

python bench/choices.py [PART_OF_A_NAME]

The judgements were written by someone who trains such models, before they read the planner's code.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

AXES = (("tensor", "tensor_parallel"), ("context", "context_parallel"), ("expert", "expert_parallel"))
CASES = Path(__file__).with_name("choices.txt")
MIXTURES = {
    "mixtral-8x7b": MixtralConfig(architectures=["MixtralForCausalLM"]),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=48, num_key_value_heads=4, head_dim=128
    ),
    "deepseek-v3": DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]),
}


def planned(model: str, machine: str, length: str) -> dict[str, Any]:
    """The plan as `fullshard plan --json` prints it. Mixtures are read from a config.json of transformers."""
    with tempfile.TemporaryDirectory() as directory:
        if model in MIXTURES:
            MIXTURES[model].save_pretrained(directory)
            model = f"{directory}/config.json"
        words = ["plan", model, "--on", machine, "--sequence-length", length, "--json"]
        command = [sys.executable, "-m", "fullshard", *words]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table_row(model: str, machine: str, length: str, judgement: str) -> str:
    """The plan in short: groups as replicas × shards, batch as microbatch × accumulated, bytes in GiB."""
    data = planned(model, machine, length)
    plan = data["best"]
    run, prediction = plan["run"], plan["prediction"]
    parts = [
        f"{plan['strategy']} {plan['replicate_degree']}×{plan['shard_degree']}",
        f"batch {plan['microbatch']}×{plan['accumulation']}",
        f"recompute {run['recompute']['mode']}"
        + (f" of {blocks} blocks" if (blocks := run["recompute"]["blocks"]) else ""),
        *(f"{axis} parallel {plan[key]}" for axis, key in AXES if plan[key] > 1),
        *(["eager"] if not run["run"]["compile"] else []),
        *([run["offload"]["tier"]] if run["offload"]["tier"] != "none" else []),
    ]
    gib, all_gib = (count / 2**30 for count in (data["bytes_per_rank"], prediction["capacity_bytes"]))
    rate = prediction["tokens_per_second"] / data["hardware"]["ranks"]
    mfu = f"{100 * prediction['mfu']:.0f}" if prediction["mfu"] else "-"
    cells = [model, machine, length, ", ".join(parts), f"{gib:.0f} of {all_gib:.0f}", f"{rate:,.0f}", mfu]
    return f"| {' | '.join([*cells, judgement])} |"


def main(part: str = "") -> None:
    print("| model | machine | tokens | plan | GiB | tokens/s a GPU | MFU % | judgement |")
    print("|---|---|---|---|---|---|---|---|")
    for line in CASES.read_text().splitlines():
        words, _, judgement = line.partition(": ")
        if part in words:
            print(table_row(*words.split(), judgement), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
