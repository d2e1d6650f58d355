"""`make fuzz`: python -m tests.fuzz [--inputs 10000] [--seed N] [--only TARGET] [--keep DIR]."""

import argparse
import random
import sys
from pathlib import Path

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

LIMIT_SECONDS = 5.0  # of the processor, for one input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-violations"))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    found = fuzz(
        inputs=asked.inputs,
        seed=asked.seed,
        targets=asked.only or list(TARGETS),
        limit_seconds=LIMIT_SECONDS,
        keep=asked.keep,
        say=lambda line: print(line, flush=True),
    )
    print(
        f"{found.worked} inputs worked, {found.refused} were refused, {len(found.violations)} violations; "
        f"the slowest took {found.slowest:.1f} s, memory grew by {found.peak_bytes >> 20} MiB at most"
    )
    if found.violations:
        print(f"their inputs are in {asked.keep}; again: --seed {asked.seed} --only TARGET")
        sys.exit(1)


if __name__ == "__main__":
    main()
