"""Injects every fault of tests/jobs/checks/faults.py, and prints which checks found it, in Markdown.

$ python -m bench.check
"""

import tempfile
import time
from pathlib import Path

from tests.fakes.families import FAMILIES
from tests.jobs.checks.faults import FAULTS, GROUP_OF, problems
from tests.jobs.checks.test_families import complaints


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        print_faults(Path(name))
        print_families(Path(name))


def print_faults(directory: Path) -> None:
    """Prints a row per fault: what its check found, and which other checks complained."""
    print("| fault | check | found | what it found | other checks |\n|---|---|---|---|---|")
    found = 0
    for number, fault in enumerate(FAULTS):
        own = directory / f"fault-{number}"
        own.mkdir()
        got = problems(fault.make(own), group=GROUP_OF[fault.check])
        hit = got.get(fault.check)
        found += hit is not None
        others = ", ".join(name for name in got if name != fault.check) or "-"
        text = "" if hit is None else hit.got.replace(str(directory), "…").replace("|", "\\|")[:110]
        print(f"| {fault.name} | `{fault.check}` | {hit.status if hit else 'no'} | {text} | {others} |")
    print(f"\n{found} of {len(FAULTS)} faults were found by the check meant for them.\n")


def print_families(directory: Path) -> None:
    """Prints the families of transformers that a check of the model complains about."""
    started, wrong = time.process_time(), dict[str, list[str]]()
    for name in FAMILIES:
        if texts := complaints(name, directory / name):
            wrong[name] = texts
    seconds = time.process_time() - started
    print(f"{len(FAMILIES) - len(wrong)} of {len(FAMILIES)} families without a complaint, in {seconds:.0f} s")
    for name, texts in wrong.items():
        print(f"- {name}: {'; '.join(texts)}")


if __name__ == "__main__":
    main()
