"""Runs items one after the other, each in a process of its own with a limit, and keeps what they find.

A directory holds the results: `results.jsonl` (a line per finished item, written at once), `page.md` (made
after each item), `items.log` (the output of finished items), `current.json` and `current.log` (figures and
output of the item that runs).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bench.gpu.items import Item
from bench.gpu.page import render_page
from bench.gpu.processes import find_processes, used_gpu_memory
from fullshard.system.files import write_file_atomically

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, LOG = "results.jsonl", "page.md", "items.log"
CURRENT, CURRENT_LOG = "current.json", "current.log"
_MARK = "BENCH_GPU_ITEM"
# Variables of a launcher that may have started this programme: an item's process must not take
# itself for one of its ranks.
_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_")
_GRACE_SECONDS = 5.0
_FREE_SECONDS, _FREE_MIB = 20.0, 1500
_LAST_LINES = 15


@dataclass(frozen=True)
class Programme:
    """Items to run, and where their results go.

    out: the directory of the results
    ends: when the time is over, on the clock `time.monotonic`
    command: of an item's process, which gets the item's name and `--result`, `--work` with a path each
    again: whether items that have a result are measured once more
    used_memory: returns the MiB in use on each GPU
    """

    items: Sequence[Item]
    out: Path
    ends: float
    command: Callable[[Item], Sequence[str]]
    again: bool = False
    used_memory: Callable[[], list[int]] = used_gpu_memory

    def seconds_left(self) -> float:
        return self.ends - time.monotonic()


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Returns the newest result of each item, without a line that was cut off while it was written."""
    path, found = directory / RESULTS, dict[str, dict[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            result = json.loads(line)
            found[result["item"]] = result
    return list(found.values())


def run_programme(programme: Programme) -> list[dict[str, Any]]:
    """Runs all items that are not among the results yet and fit into the time left. Returns all results."""
    out = programme.out
    out.mkdir(parents=True, exist_ok=True)
    done = set[str]() if programme.again else {result["item"] for result in read_results(out)}
    for item in programme.items:
        if item.name in done:
            continue
        if programme.seconds_left() < item.seconds:
            left = max(0.0, programme.seconds_left())
            print(f"{item.name}: left for another time, needs {item.seconds} s of the {left:.0f} s left")
            continue
        print(f"{item.name}: {item.answers} …", flush=True)
        result = run_item(programme, item)
        print(f"  {result['status']} after {result['seconds']:.0f} s{_first_line(result)}", flush=True)
        if result["status"] == "out of time":
            continue
        append_result(out, result)
        write_file_atomically(out / PAGE, render_page(read_results(out)))
    results = read_results(out)
    write_file_atomically(out / PAGE, render_page(results))
    return results


def run_item(programme: Programme, item: Item) -> dict[str, Any]:
    """Runs an item in a process of its own, and returns its result, whatever happens to the process."""
    out, started, began = programme.out, time.time(), time.monotonic()
    limit = min(item.limit_seconds, programme.seconds_left())
    current, current_log = out / CURRENT, out / CURRENT_LOG
    write_file_atomically(current, json.dumps({"rows": [], "details": {}, "unavailable": ""}))
    left = _wait_for_free_memory(programme.used_memory)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as work:
        with current_log.open("wb") as log:
            command = programme.command(item)
            arguments = [*command, item.name, "--result", str(current), "--work", work]
            exit_code = _run_with_limit(arguments, log, environment=item.environment, limit_seconds=limit)
        for file in Path(work).glob("*.toml"):
            shutil.copy(file, out)
    found, text = json.loads(current.read_text()), current_log.read_text(errors="replace")
    status, reason = "done", ""
    if exit_code is None:
        status = "timed out" if limit == item.limit_seconds else "out of time"
        reason = f"killed after {limit:.0f} s\n{_last_lines(text)}"
    elif exit_code:
        status, reason = "failed", f"exit code {exit_code}\n{_last_lines(text)}"
    elif found["unavailable"]:
        status, reason = "not available", found["unavailable"]
    with (out / LOG).open("a") as log:
        log.write(f"===== {item.name}: {status}\n{text}\n")
    return {
        "item": item.name,
        "answers": item.answers,
        "kind": item.kind,
        "status": status,
        "reason": reason,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.monotonic() - began, 1),
        "environment": dict(item.environment),
        "rows": found["rows"],
        "details": found["details"] | ({"MiB in use before": left} if left else {}),
    }


def _run_with_limit(
    command: Sequence[str], log: BinaryIO, *, environment: Mapping[str, str], limit_seconds: float
) -> int | None:
    """Returns the exit code of a command, or None if it was killed at the limit.

    All its processes are killed at its end, also those in sessions of their own, as torchrun's ranks are:
    they have inherited a variable.
    """
    paths, mark = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")], {_MARK: uuid.uuid4().hex}
    inherited = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.match(name)}
    own = {**inherited, **environment, **mark, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        command, cwd=ROOT, env=own, stdout=log, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        return process.wait(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
        return None
    finally:
        process.kill()
        while found := find_processes(mark):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
        process.wait()


def _wait_for_free_memory(used_memory: Callable[[], list[int]]) -> list[int]:
    """Waits until the processes of the item before have left the GPUs. Returns what they still use."""
    deadline = time.monotonic() + _FREE_SECONDS
    while max(used := used_memory(), default=0) > _FREE_MIB:
        if time.monotonic() > deadline:
            return used
        time.sleep(0.5)
    return []


def append_result(directory: Path, result: dict[str, Any]) -> None:
    """Appends a line to the results, and waits until it is on the drive."""
    path = directory / RESULTS
    cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())


def copy_earlier_results(source: Path, out: Path) -> None:
    """Copies the results of an earlier directory into an empty one, so that both are in one place."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, LOG):
        if (source / name).exists() and not (out / name).exists():
            shutil.copy(source / name, out / name)


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])


def _first_line(result: Mapping[str, Any]) -> str:
    return f": {result['reason'].splitlines()[0]}" if result["reason"] else ""
