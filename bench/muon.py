"""Compares the validation losses of Muon and AdamW on the default model, both tuned over five rates.

    python bench/muon.py [--steps 200] [--seeds 6] [--rates 5] [--dir RUNS]

For each optimizer and rate, one run with seed 0 chooses the rate with the lowest validation loss. While that
is the lowest or the highest rate, half or twice of it is tried too. The other seeds then run at the best rate
alone. Prints each loss, the means, and the mean difference of pairs with its standard error. Losses of two
seeds differ more than many optimizers do, so one pair decides nothing. Runs that have ended are not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)


def validation_loss(name: str, rate: float, *, seed: int, steps: int, root: Path) -> float:
    """Trains the default model, and returns its last validation loss."""
    directory = root / f"{name}-{rate:g}-{seed}"
    if (loss := read_validation_loss(directory)) is not None:
        return loss
    settings = {
        "optimizer.name": name,
        "optimizer.learning_rate": rate,
        "train.steps": steps,
        "train.validate_every": 0,
        "run.seed": seed,
        "run.dir": directory,
    }
    command = [sys.executable, "-m", "fullshard", "train"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loss = read_validation_loss(directory)
    assert loss is not None, "a run ends with a validation"
    return loss


def read_validation_loss(directory: Path) -> float | None:
    """Returns the last validation loss of the run in `directory`, and prints it; None before its end."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    losses = [loss for line in lines if (loss := json.loads(line).get("validation_loss")) is not None]
    if not losses:
        return None
    print(f"{directory.name:16} {losses[-1]:.4f}", flush=True)
    return losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rates", type=int, default=len(RATES), help="the first of the rates")
    parser.add_argument("--dir", type=Path, default=Path("runs/muon"))
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    for name in ("adamw", "muon"):

        def loss(rate: float, seed: int, name: str = name) -> float:
            return validation_loss(name, rate, seed=seed, steps=given.steps, root=given.dir)

        of_rates = {rate: loss(rate, 0) for rate in RATES[: given.rates]}
        while (best := min(of_rates, key=of_rates.__getitem__)) in (min(of_rates), max(of_rates)):
            further = best / 2 if best == min(of_rates) else 2 * best
            of_rates[further] = loss(further, 0)
        found[name] = [of_rates[best], *(loss(best, seed) for seed in range(1, given.seeds))]
        print(f"{name}: rate {best:g}, mean {statistics.mean(found[name]):.4f}")
    pairs = [muon - adamw for adamw, muon in zip(found["adamw"], found["muon"], strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
    print(f"muon - adamw: {statistics.mean(pairs):+.4f} ± {error:.4f} over {len(pairs)} seeds")


if __name__ == "__main__":
    main()
