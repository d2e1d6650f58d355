"""Measures how long `fullshard plan` takes, and `fullshard train` until its first step is done.

    python bench/instant.py --repeat 5 plan llama3-8b --on 8xH100
    python bench/instant.py --repeat 5 train

Each line is a median, and the runs that it is of. Processor seconds are user and system time of the
command and of all its processes; they depend little on what else the machine does, the wall time does much.
`train` also reports the processor seconds of the launcher alone, and of the busiest rank. Linux only.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=("plan", "train"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the verb")
    arguments = parser.parse_args()
    measure = plan if arguments.verb == "plan" else train
    rows = [measure(arguments.rest) for _ in range(arguments.repeat)]
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"median {name:32} {statistics.median(values):7.2f}   of {[round(one, 2) for one in values]}")


def plan(arguments: Sequence[str]) -> dict[str, float]:
    """Runs one plan to its end."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "fullshard", "plan", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall seconds": time.perf_counter() - began, "processor seconds": processor}


def train(arguments: Sequence[str]) -> dict[str, float]:
    """Runs the default run until a rank reports the first step, and ends it after two more."""
    with tempfile.TemporaryDirectory() as directory:
        settings = ["--set", f"run.dir={directory}/run", "--set", "train.steps=3", *arguments]
        command = [sys.executable, "-m", "fullshard", "train", *settings]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None, "it is a pipe"
            for line in child.stderr:
                if line.startswith("first step "):
                    wall = time.perf_counter() - began
                    spent = list(_processor_seconds(child.pid))
                    break
            else:
                sys.exit(f"{' '.join(command)} ended without a first step")
            child.stderr.read()
    return {
        "wall seconds": wall,
        "processor seconds": sum(spent),
        "processor seconds, launcher": spent[0],
        "processor seconds, busiest rank": max(spent[1:]),
    }


def _processor_seconds(pid: int) -> Iterator[float]:
    """Yields the processor seconds of a process and its ended children, then those of each living child."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    yield sum(map(int, fields[11:15])) / TICKS
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _processor_seconds(int(child))


if __name__ == "__main__":
    main()
