"""Measures on GPUs what the planner predicts, in order of worth.

    sh bench/gpu/start.sh collect wheels                           # what a GPU machine may lack
    sh bench/gpu/start.sh run wheels --minutes 40 --out runs/gpu   # installs it without a network, and runs:
    python -m bench.gpu --minutes 40 --out runs/gpu                # the items for one GPU
    python -m bench.gpu --ranks 8 --minutes 60 --out runs/gpu8     # those for several
    python -m bench.gpu --minutes 9 --out OUT --resume EARLIER     # items that EARLIER lacks, as many as fit
    python -m bench.gpu --minutes 9 --only '3b/*' --list
    python -m bench.gpu --minutes 90 --toy                         # all of them at toy size, on CPU ranks

Each item is measured in a process of its own, with a limit. Results: bench/gpu/README.md.
"""

import argparse
import importlib.util
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu.items import Card, Item

_NEEDED = ("torch", "pydantic", "numpy", "yaml", "rich", "safetensors", "typer", "xxhash")
_TOY_RANKS = 8
_LARGE_BYTES = 100 << 30


def main(arguments: list[str] | None = None) -> int:
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"this Python lacks {', '.join(missing)}: sh bench/gpu/start.sh run WHEELS", file=sys.stderr)
        return 2
    from bench.gpu.programme import PAGE, Programme, copy_earlier_results, run_programme
    from bench.gpu.programme_items import choose_items, find_item

    parser = _build_parser()
    asked, others = parser.parse_known_args(arguments)
    if others:
        parser.error(f"unknown: {' '.join(others)}; --only chooses items by name, and --list shows all")
    ranks = asked.ranks or (_TOY_RANKS if asked.toy else 1)
    card: Card = asked.card or ("h200" if asked.list or asked.toy else find_card())
    names = [one.name for one in choose_items(asked.only, ranks=ranks, is_toy=asked.toy)]
    items = [find_item(name, card=card, is_toy=asked.toy) for name in names]
    if not items:
        parser.error(f"no item matches {' '.join(asked.only or [])}; --list shows all")
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

    def command(item: "Item") -> list[str]:
        return item_command(item, ranks=ranks, card=card, is_toy=asked.toy)

    results = run_programme(Programme(items, asked.out, ends, command, again=asked.again))
    counted = [result for result in results if result["item"] in names]
    absent = sum(result["status"] == "not available" for result in counted)
    print(f"{asked.out / PAGE}: {len(results)} items, {absent} not available")
    has_failed = any(result["status"] in ("failed", "timed out") for result in results)
    return 1 if has_failed or 3 * absent >= max(3, len(counted)) else 0


def _build_parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--ranks", type=int, help="of this machine: more than 1 for the items for several")
    parser.add_argument("--card", choices=("h100", "h200"), help="sizes of the items (by the GPU's memory)")
    parser.add_argument("--toy", action="store_true", help="all items at toy size, on CPU ranks")
    parser.add_argument("--list", action="store_true", help="show the items, and run nothing")
    return parser


def find_card() -> "Card":
    """Returns the sizes that this machine's GPU has memory for."""
    from fullshard.launch.detect import detect_gpus

    return "h200" if detect_gpus().memory_bytes > _LARGE_BYTES else "h100"


def item_command(item: "Item", *, ranks: int, card: "Card", is_toy: bool) -> list[str]:
    """Returns the command of an item's process, or of torchrun for an item that all ranks measure."""
    from bench.gpu.items import ONCE

    # At toy size, an item has the ranks that it needs and no more.
    world = min(ranks, item.ranks) if is_toy else ranks
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m"]
    own = [*(torchrun if world > 1 and item.kind not in ONCE else []), "bench.gpu.measure"]
    return [sys.executable, "-m", *own, f"--card={card}", f"--ranks={world}", *(["--toy"] if is_toy else [])]


if __name__ == "__main__":
    sys.exit(main())
