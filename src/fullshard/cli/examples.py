"""Examples at the end of each command's `--help`."""

# Command -> lines. Text behind two blanks explains; the rest runs as it is, with files of the user's.
EXAMPLES = {
    "": """
fullshard train                             the default model, about two minutes
fullshard plan llama3-8b --on 8xH100        memory and time, before any GPU is rented
fullshard init                              a run.toml to begin with
fullshard --install-completion              complete commands, options and settings with Tab
""",
    "train": """
fullshard train run.toml
fullshard train run.toml --set train.steps=1000 --set optimizer.learning_rate=2e-5
fullshard train run.toml --resume           after Ctrl-C, a crash, or on other ranks
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard train run.toml
""",
    "plan": """
fullshard plan llama3-8b --on 8xH100
fullshard plan llama3-70b --on 8x8xH100 --tokens-per-step 4M --compare
fullshard plan path/to/config.json --on 8xMI300X --budget 1T --price 2.5
fullshard plan llama3-8b --on 8xH100 --budget 15T --fewest-gpus-in-days 30
fullshard plan llama3-8b --on 8xH100 --trace step.json.gz
fullshard plan run.toml --save plan.json    then: fullshard train --plan plan.json
""",
    "check": """
fullshard check run.toml
fullshard check run.toml --verbose          what every check found
fullshard check run.toml --set train.steps=100 --json
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard check run.toml
""",
    "calibrate": """
fullshard calibrate
fullshard calibrate --drive /mnt/nvme       with the drive that offload.path is on
torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard calibrate --out hardware.toml
""",
    "report": """
fullshard report runs/default
fullshard report runs/default --html report.html     a page with curves, also while it trains
fullshard report runs/a runs/b --html compare.html
fullshard report runs/a runs/b --json
""",
    "trace": """
fullshard trace runs/default                the last sampled step, as trace.json.gz
fullshard trace runs/default --step 100 --out step-100.json.gz
""",
    "watch": """
fullshard watch runs/default                until the run ends, or Ctrl-C
fullshard watch runs/default --once
fullshard watch runs/default --json
""",
    "init": """
fullshard init
fullshard init experiments/small.toml
fullshard init --all                        every key, its default and its values
""",
    "convert": """
fullshard convert ds_config.json > run.toml
fullshard convert accelerate.yaml --ranks 8
""",
    "ckpt list": """
fullshard ckpt list runs/default
""",
    "ckpt verify": """
fullshard ckpt verify runs/default
fullshard ckpt verify runs/default/checkpoints/step-00000200
""",
    "ckpt diff": """
fullshard ckpt diff runs/a/checkpoints/step-00000200 runs/b/checkpoints/step-00000200
""",
    "ckpt gather": """
fullshard ckpt gather node0/runs/x node1/runs/x --to whole
""",
    "ckpt export": """
fullshard ckpt export runs/default model.safetensors
fullshard ckpt export runs/x out --format hf --dtype bf16      for from_pretrained
fullshard ckpt export runs/x adapters --format peft
""",
    "data prepare": """
fullshard data prepare run.toml
fullshard data prepare run.toml --set data.packing=best_fit
""",
}


def examples_text(command: str) -> str:
    """Returns the examples of a command as the end of its help; `\\b` keeps its line breaks."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES[command].strip().splitlines())
    return f"\b\nExamples:\n{lines}"
