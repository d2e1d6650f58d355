"""What `fullshard bench overhead` found, as a page."""

from collections.abc import Mapping
from typing import Any


def overhead_page(result: Mapping[str, Any]) -> str:
    """The figures of `fullshard.training.overhead.summary` as Markdown for `bench/results/`."""
    low, high = result["ratio_interval"]
    ratios = sorted(result["ratios"])
    return "\n".join(
        [
            "| what | |",
            "|---|---|",
            f"| ratio of step times, fullshard / plain loop, median | **{result['ratio_median']:.3f}** |",
            f"| 95 % interval of the median (bootstrap) | {low:.3f} to {high:.3f} |",
            f"| range over pairs | {ratios[0]:.3f} to {ratios[-1]:.3f} |",
            f"| pairs, alternating in one job | {result['pairs']}, of {result['steps_a_turn']} steps each |",
            f"| median step, fullshard | {1000 * result['seconds_ours']:.1f} ms |",
            f"| median step, plain loop | {1000 * result['seconds_plain']:.1f} ms |",
            f"| ranks | {result['world_size']} on {result['device']}, torch {result['torch']} |",
        ]
    )
