"""`python -m MODULE ARGUMENTS` in a process that is forked with torch imported: a second or two sooner.

Not for tests of how a process starts or ends by itself: it is multiprocessing that ends it, without `atexit`.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ranks.pool import warm


class Command:
    """A module that runs in a process of its own; used as `subprocess.Popen` is. Its output goes to files."""

    def __init__(self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str]) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="command-")
        self._paths = [Path(self._kept.name, name) for name in ("out", "err")]
        outputs = [str(path) for path in self._paths]
        self._process = warm().Process(
            target=_run, args=(module, list(arguments), dict(environment), outputs)
        )
        self._process.start()
        assert self._process.pid is not None, "it is started"
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def error_output(self) -> str:
        """Returns what it has written to standard error so far."""
        return self._paths[1].read_text() if self._paths[1].exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what it wrote to standard output and to standard error, once it has ended."""
        self.wait(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._paths)
        return out, err

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.kill()
        self.wait()
        self._process.close()
        self._kept.cleanup()


def _run(module: str, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    for descriptor, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as TMPDIR says, once it is asked for
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
