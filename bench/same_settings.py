"""Prints by what the speeds of published rows differ that have the same settings on two pages.

python bench/same_settings.py
"""

import itertools
import statistics
from typing import Any

from published import PREDICTED_SETS, rows_of

SAME = (
    *("chip", "nodes", "gpus_per_node", "model", "sequence_length", "microbatch", "strategy", "recompute"),
    *("compile", "precision", "attention", "tensor_parallel", "context_parallel"),
)


def is_pair(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two rows have the same settings (`SAME`) and different pages as sources."""
    pages = {row["source"].split()[0] for row in (one, other)}
    return len(pages) == 2 and all(one.get(key, 1) == other.get(key, 1) for key in SAME)


def main() -> None:
    rows = rows_of(*PREDICTED_SETS)
    differences = []
    for one, other in itertools.combinations(rows, 2):
        if is_pair(one, other):
            speeds = sorted(row["tokens_per_second_per_gpu"] for row in (one, other))
            differences.append(speeds[1] / speeds[0] - 1)
            print(f"{100 * differences[-1]:5.1f} %  {one['name']} | {other['name']}")
    print(f"{len(differences)} pairs, median {100 * statistics.median(differences):.1f} %")


if __name__ == "__main__":
    main()
