"""`make torture`: every fault many times over, and the table of what came of it (docs/faults.md).

python -m tests.faults.torture [--trials 300] [--page docs/faults.md] [--only offload | --only calls]
"""

import argparse
import errno
import itertools
import platform
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import _pytest.outcomes
import torch

from fullshard.quantities import format_bytes
from tests.checkpoint.states import saved_sharded
from tests.faults.calls import ANY_ERROR, ERRORS, KILL, NOTHING, SHORT
from tests.faults.collectives import fail_at_each_collective
from tests.faults.damage import ACTS, FILES, damaged_start
from tests.faults.pairs import PAIRS, two_faults
from tests.faults.soak import kill_one_run
from tests.faults.sweeps import LOG, LOST_WRITES, SWEEPS, apart, sweep_of_full_logs
from tests.faults.test_disks import DISK_FAULTS, cut_while_training, disk_fault
from tests.faults.test_kills import EVERY, VICTIMS, kill_again_and_again
from tests.ranks import Workers

HEAD = """# Faults, and what came of them

Made by `make torture` ({trials} kills and {trials} damages, or more), {day}, torch {torch}, {machine}.
A training of two gloo ranks saves after every step. After each fault it is started again, and this is held:
it resumes from the newest step whose save was acknowledged, or a later one; every loss of every attempt is
that of an undisturbed run, bit for bit; nothing hangs. A row that broke one of these would not be here: the
run stops at it. Every directory of checkpoints holds files, links and fifos of others, some of them under the
names of checkpoints. While ranks are killed, another process loads the newest checkpoint again and again, and
no load fails.

| fault | saving | times | what the next start did |
|---|---|---|---|
"""

OFFLOAD = "## State on the host or a drive"
OFFLOAD_HEAD = f"""{OFFLOAD}

Made by `python -m tests.faults.torture --only offload --trials {{trials}}`, {{day}}, torch {{torch}},
{{machine}}. The same with state kept outside of the device: ten groups and four units a rank, a generation
committed after every step and a checkpoint every {EVERY}. Ranks are killed while they start, or at a random
moment of some {2 * EVERY} steps. Each start resumes from no older step than the newest that all ranks have
reported whole on their drives, nor than the newest checkpoint; from exactly that with state in host memory,
which dies with its process.

| fault | saving | times | what it hit: what the next start went on from |
|---|---|---|---|
"""
CALLS = "## Every call, lost writes, two faults, one run for long"
CALLS_HEAD = f"""{CALLS}

Made by `python -m tests.faults.torture --only calls --trials {{trials}}`, {{day}}, torch {{torch}},
{{machine}}. The first call of an act to the operating system fails (EIO, ENOSPC, ESTALE, EROFS, a write in
part, writes of nothing), or the process is killed at it, in the middle of a write; then the second call, and
so on, until there is no such call. Every error is fullshard's own; what had been acknowledged loads bit for
bit; what others have in the directory stays; the same act succeeds afterwards, and leaves no draft. A power
cut may lose any part of what was not flushed: states that the disk can then have are built, and loaded. Of
two ranks, one has no connection from a collective on, or is killed at it: the other rank ends by itself, and
the next start resumes with equal losses.

| fault | act | times | what came of it |
|---|---|---|---|
"""
EVERY_ERROR = 100  # trials; with fewer, the calls fail with one of the errors in turn
TIERS = ("optimizer:nvme", "params+optimizer:nvme", "optimizer:cpu")


def kills(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    each = -(-trials // (3 * len(VICTIMS)))
    for mode in ("sync", "async", "live"):
        for victims in VICTIMS:
            with tempfile.TemporaryDirectory() as name:
                kill_again_and_again(ranks, Path(name), mode=mode, victims=victims, times=each)
            yield f"SIGKILL of {victims}", mode, Counter({"resumed": each})


def power_cuts(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    for mode in ("sync", "async"):
        for at_once, moment in (
            (True, "right after the save was acknowledged"),
            (False, "at a random moment"),
        ):
            with tempfile.TemporaryDirectory() as name:
                outcomes = cut_while_training(
                    ranks,
                    Path(name),
                    mode=mode,
                    right_after_acknowledging=at_once,
                    times=max(trials // 12, 3),
                )
            yield f"power cut {moment} (ext4)", mode, Counter(_short(one) for one in outcomes)


def disks(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    for fault in DISK_FAULTS:
        for mode in ("sync", "async"):
            counted: Counter[str] = Counter()
            for _ in range(max(trials // 100, 1)):
                with tempfile.TemporaryDirectory() as name:
                    ended, started = disk_fault(ranks, Path(name), fault=fault, mode=mode)
                why = [line.strip() for line in ended.splitlines() if line.startswith("  why: ")]
                how = f"stopped, {why[0]}" if why else ended
                counted[f"{how}; then {_short(started)}"] += 1
            yield f"disk {fault}", mode, counted


def damages(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    each = -(-trials // (len(ACTS) * len(FILES)))
    with tempfile.TemporaryDirectory() as name:
        for step in (1, 2):
            ranks(2).run(saved_sharded, Path(name, "sound"), step, (2,))
        for files in FILES:
            for act in ACTS:
                rng = random.Random(f"{act} {files}")
                counted = Counter(
                    damaged_start(Path(name, "sound"), Path(name, "damaged"), act=act, files=files, rng=rng)
                    for _ in range(each)
                )
                yield f"{act}: `{files}`", "", counted


def offloaded_kills(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    each = -(-trials // (2 * len(VICTIMS) * len(TIERS)))
    for tier in TIERS:
        for mode in ("sync", "async"):
            for victims in VICTIMS:
                with tempfile.TemporaryDirectory() as name:
                    came = kill_again_and_again(
                        ranks, Path(name), tier=tier, mode=mode, victims=victims, times=each
                    )
                yield f"SIGKILL of {victims}, `{tier}`", mode, came


def calls(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    for how in (*(ERRORS if trials >= EVERY_ERROR else [ANY_ERROR]), SHORT, NOTHING, KILL):
        name = errno.errorcode[how] if isinstance(how, int) else how
        for act, sweep in SWEEPS.items():
            if how == NOTHING and act == LOG:  # it is Python's own buffer that would write for ever
                continue
            if count := apart(sweep, how):
                yield f"{name}, each call", act, Counter({"nothing lost": count})
    yield "no room, each byte", "the log", Counter({"an error": apart(sweep_of_full_logs)})
    for act, lose in LOST_WRITES.items():
        yield "lost writes", act, Counter({"nothing lost": apart(lose, max(trials // 50, 1))})


def collectives(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    cases = list(itertools.product((False, True), (0, 1), ("sync", "async")))
    stride = max(len(cases) * 300 // trials, 1)  # with 300, each collective is the last one in a case
    for i, (kills, victim, mode) in enumerate(cases):
        with tempfile.TemporaryDirectory() as name:
            count = fail_at_each_collective(
                ranks, Path(name), mode=mode, victim=victim, kills=kills, begin=i + 1, stride=stride
            )
        how = "is killed at" if kills else "loses its connections at"
        yield f"rank {victim} {how} a collective", f"training, {mode}", Counter({"resumed": count})


def pairs(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    for faults in PAIRS:
        counted: Counter[str] = Counter()
        for seed in range(max(trials // 50, 1)):
            with tempfile.TemporaryDirectory() as name:
                mode = ("sync", "async")[seed % 2]
                counted[two_faults(ranks, Path(name), faults=faults, mode=mode, seed=seed) + "; resumed"] += 1
        yield " and ".join(faults), "training", counted


def soaks(ranks: Callable, trials: int) -> Iterator[tuple[str, str, Counter[str]]]:
    times = max(2 * trials // 3, 1)
    with tempfile.TemporaryDirectory() as name:
        steps, files, size = kill_one_run(ranks, Path(name), times=times, mode="async")
    left = f"all {steps} steps with the losses of a run without; {files} files of {format_bytes(size)} left"
    yield "SIGKILL of one or all ranks, of one run", "`fullshard train`, async", Counter({left: times})


def _short(outcome: str) -> str:
    return "resumed" if outcome.startswith("resumed") else outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--page", type=Path, default=Path("docs/faults.md"))
    parser.add_argument("--only", choices=["checkpoints", "offload", "calls"])  # the page's others stay
    asked = parser.parse_args()
    before, found, after = (asked.page.read_text() if asked.page.exists() else "").partition(OFFLOAD)
    middle, also_found, end = (found + after).partition(CALLS)
    texts = {"checkpoints": before, "offload": middle, "calls": also_found + end}
    sections = {name: text.strip("\n") for name, text in texts.items()}
    parts = {
        "checkpoints": (HEAD, (kills, power_cuts, disks, damages)),
        "offload": (OFFLOAD_HEAD, (offloaded_kills,)),
        "calls": (CALLS_HEAD, (calls, collectives, soaks, pairs)),
    }
    workers = Workers()
    for section, (head, own) in parts.items():
        if asked.only in (None, section):
            said = {"day": date.today(), "torch": torch.__version__, "machine": platform.system()}
            head = head.format(trials=asked.trials, **said)  # noqa: PLW2901
            sections[section] = head + "\n".join(_rows(workers.pool, own, trials=asked.trials))
    workers.close()
    asked.page.write_text("\n\n".join(text for text in sections.values() if text) + "\n")


def _rows(ranks: Callable, parts: Sequence[Callable], *, trials: int) -> list[str]:
    rows: list[str] = []
    for part in parts:
        try:
            for fault, saving, outcomes in part(ranks, trials):
                came = ", ".join(f"{outcome} ({count})" for outcome, count in sorted(outcomes.items()))
                rows.append(f"| {fault} | {saving} | {outcomes.total()} | {came} |")
                print(rows[-1], flush=True)
        except _pytest.outcomes.Skipped as skipped:  # no root
            rows.append(f"| {part.__name__.replace('_', ' ')} | | 0 | not tried: {skipped} |")
    return rows


if __name__ == "__main__":
    main()
