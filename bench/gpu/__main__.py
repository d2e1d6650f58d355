"""Measures on GPUs what the planner predicts, in order of worth.

    python -m bench.gpu --minutes 40 --out runs/gpu                # every item
    python -m bench.gpu --minutes 9 --out OUT --resume EARLIER     # items that EARLIER lacks, as many as fit
    python -m bench.gpu --minutes 9 --only '3b/*' --list
    python -m bench.gpu --minutes 30 --toy                         # at toy size, on the CPU

Each item is measured in a process of its own, with a limit. Results: bench/gpu/README.md.
"""

import argparse
import signal
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from bench.gpu.items import ITEMS, Item, toy
from bench.gpu.programme import PAGE, Programme, copy_earlier_results, run_programme


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40, help="items that take longer are left out (40)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="directory of the results (runs/gpu)"
    )
    parser.add_argument(
        "--resume", type=Path, help="directory of earlier results, which are not measured again"
    )
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="items by name, such as '3b/*'")
    parser.add_argument("--again", action="store_true", help="measure items that have a result once more")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each item, on this machine (1)")
    parser.add_argument("--toy", action="store_true", help="toy size, on CPU ranks")
    parser.add_argument("--list", action="store_true", help="show the items, and run nothing")
    asked, others = parser.parse_known_args(arguments)
    if others:
        parser.error(f"unknown: {' '.join(others)}; --only chooses items by name, and --list shows all")
    items = choose_items(asked.only)
    if not items:
        parser.error(f"no item matches {' '.join(asked.only)}; --list shows all")
    if asked.resume is not None and not asked.resume.is_dir():
        parser.error(f"--resume {asked.resume}: there is no such directory")
    if asked.list:
        print("\n".join(f"{one.name:<26} {one.seconds:>4} s  {one.answers}" for one in items))
        return 0
    ends = time.monotonic() + 60 * asked.minutes
    if asked.resume is not None:
        copy_earlier_results(asked.resume, asked.out)
    # The item that runs is in a process group of its own, and is killed as this process exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = item_command(ranks=asked.ranks, is_toy=asked.toy)
    items = [toy(item) for item in items] if asked.toy else items
    results = run_programme(Programme(items, asked.out, ends, command, again=asked.again))
    print(f"{asked.out / PAGE}: {len(results)} items")
    return 1 if any(result["status"] in ("failed", "timed out") for result in results) else 0


def choose_items(patterns: list[str] | None) -> list[Item]:
    """Returns the items whose name matches any of the patterns, in order of worth; all without patterns."""
    return [item for item in ITEMS if patterns is None or any(fnmatch(item.name, one) for one in patterns)]


def item_command(*, ranks: int, is_toy: bool) -> list[str]:
    """Returns the command of an item's process."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    own = [*(torchrun if ranks > 1 else []), "bench.gpu.measure", *(["--toy"] if is_toy else [])]
    return [sys.executable, "-m", *own]


if __name__ == "__main__":
    sys.exit(main())
