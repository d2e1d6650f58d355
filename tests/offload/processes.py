"""Processes of the tests: started, waited for, and killed."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

from tests.ranks.command import Command


@contextmanager
def running(verb: str, directory: Path, note: Path):
    """Starts the writer in a preforked process, which is quicker; kills it at the end."""
    command = Command("tests.offload.writer", [verb, str(directory), str(note)], environment=os.environ)
    try:
        yield command
    finally:
        command.close()


def wait_for(path: Path, process: Command) -> str:
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        assert process.poll() is None, "it ended"
        time.sleep(0.01)
    return path.read_text()
