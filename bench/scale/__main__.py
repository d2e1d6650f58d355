"""Prints what grows with the number of ranks: processor seconds and bytes of operations on the host.

    python -m bench.scale [--ranks 1024,4096,16384] [--only PART_OF_A_NAME] [--planner]

Each row calls fullshard's own functions in a process of its own, with the inputs of that many ranks. Figures
with a star are derived: from fewer tensors, blocks or kept checkpoints than a model of 405B parameters
has (126 blocks, 3,411 saved tensors), or from meshes of 4 to 24 real ranks. torch's fake process group stands
in for collectives, in which the other ranks send what rank 0 sends; the transport itself is not measured.
`--planner` adds plans, which take minutes. The exit code is 1 if a row is over its limit.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from bench.scale.checkpoints import CHECKPOINT_CASES
from bench.scale.control import CONTROL_CASES
from bench.scale.measure import Case, Row

RANKS = (1024, 4096, 16384)
MILLION = ("--sequence-length", "1048576", "--set", "model.max_sequence=1048576")
PLANS = {
    "405B": ("llama3.1-405b",),
    "DeepSeek-V3": ("deepseek-v3",),
    "Kimi K2": ("kimi-k2",),
    "8B, rows of 1M tokens": ("llama3.1-8b", *MILLION),
    "405B, rows of 1M tokens": ("llama3.1-405b", *MILLION),
}


def plan_rows(ranks: int, _: int) -> list[Row]:
    """Plans on nodes of eight H100, each in a process of its own with an empty cache."""
    return [_plan_row(name, words, ranks) for name, words in PLANS.items()]


def _plan_row(name: str, words: Sequence[str], ranks: int) -> Row:
    command = [sys.executable, "-m", "fullshard", "plan", *words, "--on", f"{ranks // 8}x8xH100", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"FULLSHARD_CACHE": cache}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Row(f"plan of {name}", ranks, seconds, 1024 * after.ru_maxrss, most_seconds=10)


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows in 80 columns, and their problems below."""
    head = ("operation", "ranks", "CPU s", "amount", "limit", "ok?")
    widths = (29, 6, 8, 13, 13, 3)
    for cells in (head, *(one.cells() for one in rows)):
        print(" ".join(f"{c:<{w}}" if w > 13 else f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    for one in rows:
        if one.problem:
            print(f"{one.operation}, {one.ranks:,} ranks: {one.problem}")


def main(words: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 1 if a row is over its limit, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--planner", action="store_true")
    options = parser.parse_args(words)
    cases = [*CONTROL_CASES, *CHECKPOINT_CASES, *([Case("planner", plan_rows)] if options.planner else [])]
    sizes = [int(one) for one in options.ranks.split(",")]
    rows = [row for case in cases if options.only in case.name for n in sizes for row in case.rows(n)]
    names = list(dict.fromkeys(row.operation for row in rows))
    print_table(sorted(rows, key=lambda row: (names.index(row.operation), row.ranks)))
    return int(not all(row.is_within_limits for row in rows))


if __name__ == "__main__":
    sys.exit(main())
