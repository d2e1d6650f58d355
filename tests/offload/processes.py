"""Processes of the tests: started, waited for, and killed with what they have started."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ranks.command import Command


def running(verb: str, directory: Path, note: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.offload.writer", verb, str(directory), str(note)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


@contextmanager
def killed_at_the_end(process: "subprocess.Popen[bytes]"):
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def keeping_on(verb: str, directory: Path, note: Path):
    """Starts the writer in a preforked process, which is quicker; kills it at the end."""
    command = Command("tests.offload.writer", [verb, str(directory), str(note)], environment=os.environ)
    try:
        yield command
    finally:
        command.close()


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        assert process.poll() is None, "it ended"
        time.sleep(0.01)
    return path.read_text()
