"""torchrun's agents as processes of a test: started, killed, asked to stop, and what they say."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.launch.jobs import SMALL

PATIENCE_SECONDS = 150.0
TRAIN = ["-m", "fullshard", "train"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Agents:
    """Starts `torchrun` with the given flags, each time an agent, for one run in `directory`."""

    def __init__(self, directory: Path, *settings: str, flags: list[str]) -> None:
        self.directory = directory
        self.logs = directory.parent / "logs"
        self.logs.mkdir()
        sets = [part for one in (*SMALL, f"run.dir={directory}", *settings) for part in ("--set", one)]
        self._torchrun = [sys.executable, "-m", "torch.distributed.run", *flags]
        self._train = [*TRAIN, *sets]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, *flags: str, within: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """One more agent, begun by the command `within`. Its words are in `logs`, under its number."""
        argv = [*within, *self._torchrun, *flags, *self._train]
        with (self.logs / str(len(self.started))).open("wb") as log:
            shared = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
            agent = subprocess.Popen(argv, env=shared, stdout=log, stderr=log)
        self.started.append(agent)
        return agent

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.logs.iterdir()))

    def lines(self) -> list[dict[str, Any]]:
        """The steps that are logged by now, one line each."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self) -> dict[str, Any]:
        path = self.directory / "launch.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert time.monotonic() < deadline, self.said()
            assert any(agent.poll() is None for agent in self.started), self.said()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in self.lines()))

    def wait_for_ranks(self, count: int) -> None:
        """Until an attempt over so many ranks has made a step."""
        self.wait_until(lambda: self.record().get("world_size") == count)
        made = len(self.lines())
        self.wait_until(lambda: len(self.lines()) > made)

    def stop(self) -> list[int]:
        """SIGTERM to all that are there; their exit codes."""
        there = [agent for agent in self.started if agent.poll() is None]
        for agent in there:
            agent.send_signal(signal.SIGTERM)
        return [agent.wait(PATIENCE_SECONDS) for agent in there]

    def kill(self) -> None:
        for agent in self.started:
            agent.kill()  # its ranks end with it
            agent.wait()


def ranks_of(agent: "subprocess.Popen[bytes]") -> list[int]:
    """The processes that an agent has started, in the order of their start."""
    path = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in path.read_text().split()]
