"""Finds processes by their environment, which ranks in sessions of their own inherit, and asks nvidia-smi."""

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def find_processes(variables: Mapping[str, str]) -> list[int]:
    """Returns the processes that were started with these environment variables."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            is_running = path.with_name("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if is_running and wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def used_gpu_memory() -> list[int]:
    """Returns the MiB in use on each GPU; none without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=20)
        return [int(line) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
