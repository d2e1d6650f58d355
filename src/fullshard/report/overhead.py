"""The result of `fullshard bench overhead` as a page."""

from collections.abc import Mapping
from typing import Any

_PEERS = {
    "plain": "a plain `fully_shard` loop",
    "plain_same_collectives": "the same loop with fullshard's gloo collectives",
}


def overhead_page(result: Mapping[str, Any]) -> str:
    """Returns the figures of `fullshard.jobs.bench_overhead.summary` as Markdown for `bench/results/`."""
    seconds = result["seconds_a_step"]
    lines = [
        f"{result['world_size']} ranks on {result['device']}, torch {result['torch']}; "
        f"{result['turns']} turns of {result['steps_a_turn']} step each, in one job. "
        f"fullshard: {1000 * seconds['fullshard']:.1f} ms a step (median).",
        "",
        "| against | step | ratio fullshard / peer, median | 95 % interval | range |",
        "|---|---|---|---|---|",
    ]
    for peer, ratio in result["ratios"].items():
        lines.append(
            f"| {_PEERS[peer]} | {1000 * seconds[peer]:.1f} ms | **{ratio['median']:.3f}** | "
            f"{ratio['low']:.3f} to {ratio['high']:.3f} | {ratio['smallest']:.3f} to {ratio['largest']:.3f} |"
        )
    return "\n".join(lines)
