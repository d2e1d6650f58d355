"""Items that compare runs of `fullshard train`: are numbers right, and do runs survive faults?"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bench.gpu.items import SMALL, Variant
from bench.gpu.processes import find_processes
from bench.gpu.record import Record

_MARK = "BENCH_GPU_VARIANT"
_POLL_SECONDS = 0.1
_MOST_SECONDS = 240.0
_AT_ONCE = 4  # small runs of one rank that share a GPU
_COMPARED = {"loss": 1, "validation_loss": 1, "grad_norm": 10}  # how many times `within` each may differ


@dataclass(frozen=True)
class Finished:
    """Contains how a run ended, and the figures of each step, of the last attempt that made it."""

    exit_code: int
    seconds: float
    output: str
    steps: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class RunsBench:
    """The runs of an item, in directories of their own in `work`."""

    record: Record
    work: Path
    settings: tuple[str, ...]
    is_toy: bool

    def measure(self, variants: tuple[Variant, ...]) -> None:
        """Runs all variants, records each, and raises SystemExit if any failed or differs from its like."""
        (self.work / "logs").mkdir(parents=True)
        finished, wrong = dict[str, Finished](), list[str]()
        at_once = _AT_ONCE if set(SMALL) <= {*self.settings} else 1
        for group in groups_that_run_at_once(variants, most=2 if self.is_toy else at_once):
            with ThreadPoolExecutor(len(group)) as threads:
                finished |= zip((one.name for one in group), threads.map(self.run, group), strict=True)
            for one in group:
                if fault := self._judge(one, finished):
                    wrong.append(f"{one.name}: {fault}")
                    self.record.details[f"wrong: {one.name}"] = fault
                    self.record.save()
        if wrong:
            raise SystemExit("\n".join(wrong))

    def run(self, variant: Variant) -> Finished:
        """Runs a variant, lets its fault befall it, and returns how it ended."""
        directory = self._directory(variant.continues or variant.name)
        asked = [*self.settings, *variant.settings, f"run.ranks={variant.ranks}", f"run.dir={directory}"]
        options = [part for setting in asked for part in ("--set", setting)]
        command = [sys.executable, "-m", "fullshard", "train", "--no-plan", *options]
        command += ["--resume"] if variant.continues or variant.begins_as else []
        if variant.begins_as:
            shutil.copytree(self._directory(variant.begins_as), directory)
        log, began = self.work / "logs" / variant.name.replace(" ", "-"), time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: variant.name},
                start_new_session=True,
            )
        try:
            seen = self._wait_and_strike(process, variant, directory)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output = f"{log.read_text(errors='replace')}{seen}"
        print(f"--- {variant.name}: exit code {process.returncode}\n{output}", flush=True)
        return Finished(process.returncode, time.monotonic() - began, output, read_steps(directory))

    def _wait_and_strike(self, process: subprocess.Popen[bytes], variant: Variant, directory: Path) -> str:
        """Waits for the run. Returns a text if it did not end in time."""
        deadline = time.monotonic() + _MOST_SECONDS * (2 if self.is_toy else 1)
        is_due, is_sampled = bool(variant.fault), variant.ranks == 1
        while process.poll() is None:
            if time.monotonic() > deadline:
                return "\nit did not end in time"
            step = max(read_steps(directory), default=0)
            if not is_sampled and step >= 2:
                is_sampled = True
                self._record_gpu_processes(variant.name)
            if is_due and step >= variant.fault_step:
                is_due = False
                number = signal.SIGKILL if variant.fault == "kill" else signal.SIGSTOP
                for pid in find_processes({_MARK: variant.name, "RANK": "1"}):
                    os.kill(pid, number)
            time.sleep(_POLL_SECONDS)
        return "\nits fault never befell it" if is_due else ""

    def _judge(self, variant: Variant, finished: Mapping[str, Finished]) -> str:
        """Records a variant, and returns what is wrong with it; empty if nothing is."""
        own = finished[variant.name]
        last = own.steps[max(own.steps)] if own.steps else {}
        self.record.add_row(variant.name, measured={"seconds": own.seconds, **_losses(last)})
        if "its fault never befell it" in own.output or "did not end in time" in own.output:
            return own.output.splitlines()[-1]
        if variant.fault == "stop":
            named = own.exit_code != 0 and "rank 1" in own.output
            return "" if named else f"exit code {own.exit_code}, and rank 1 is not named"
        if own.exit_code:
            return f"exit code {own.exit_code}: {' '.join(own.output.split()[-40:])}"
        if variant.like:
            worst = greatest_difference(own.steps, finished[variant.like].steps)
            self.record.add_row(variant.name, measured={"difference": worst})
            if not worst <= variant.within:
                return f"differs from {variant.like} by {worst:.3g}, over {variant.within:g}"
        asked = (*self.settings, *variant.settings)
        if variant.continues or any(one.startswith("checkpoint.every=") for one in asked):
            directory = self._directory(variant.continues or variant.name)
            command = [sys.executable, "-m", "fullshard", "ckpt", "verify", str(directory)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            return "" if done.returncode == 0 else f"a checkpoint is damaged: {done.stdout}{done.stderr}"
        return ""

    def _directory(self, name: str) -> Path:
        return self.work / name.replace(" ", "-")

    def _record_gpu_processes(self, name: str) -> None:
        """Records which processes have memory on which GPU: more than one on a GPU has a context too many."""
        query = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid,used_memory", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
            self.record.details[f"processes on GPUs: {name}"] = sorted(found)


def groups_that_run_at_once(variants: tuple[Variant, ...], *, most: int) -> Iterator[list[Variant]]:
    """Yields the variants in their order: those of one rank that begin a run of their own, `most` at once."""
    awaited = {one.begins_as for one in variants}
    alone = [one for one in variants if one.ranks > 1 or one.continues or one.name in awaited]
    for is_alone, members in groupby(variants, lambda one: one in alone):
        rest = [*members]
        while rest:
            count = 1 if is_alone else most
            yield rest[:count]
            rest = rest[count:]


def read_steps(directory: Path) -> dict[int, dict[str, float]]:
    """Returns the figures of each step in a run's metrics.jsonl, those of the last attempt."""
    found = dict[int, dict[str, float]]()
    path = directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            figures = json.loads(line)
            found[figures["step"]] = figures
    return found


def greatest_difference(
    steps: Mapping[int, Mapping[str, float]], others: Mapping[int, Mapping[str, float]]
) -> float:
    """Returns the greatest relative difference of a loss, or a tenth of that of a norm; without any, ∞."""
    found = [
        abs(figures[key] - others[step][key]) / max(abs(others[step][key]), 1e-30) / times
        for step, figures in steps.items()
        for key, times in _COMPARED.items()
        if key in figures and key in others.get(step, {})
    ]
    return max(found, default=float("inf"))


def _losses(figures: Mapping[str, float]) -> dict[str, float]:
    return {"last_loss": figures["loss"]} if "loss" in figures else {}
