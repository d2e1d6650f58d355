"""A real S3 server on the loopback."""

import importlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fullshard.system import object_store

BUCKET = "bucket"


@dataclass(frozen=True)
class Server:
    """`environment`: what makes AWS's library ask this server."""

    process: "subprocess.Popen[bytes]"
    environment: dict[str, str]

    def url(self, name: str) -> str:
        """An empty prefix for one test."""
        return f"s3://{BUCKET}/{name}-{time.monotonic_ns()}"


@contextmanager
def served(directory: Path) -> Iterator[Server]:
    """A server with an empty bucket. Skips the test where the server is not installed."""
    for package in ("moto", "flask_cors", "s3fs"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'fullshard[dev]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _await(port, process)
            make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(make, timeout=60).close()
            _forget_earlier_servers()
            yield Server(process, environment(port))
        finally:
            process.kill()
            process.wait()


def _forget_earlier_servers() -> None:
    """Drops the file systems that this process keeps, which would ask a server that has ended."""
    importlib.import_module("s3fs").S3FileSystem.clear_instance_cache()
    object_store._shared_file_system.cache_clear()


SECRET = "of-this-test-alone"


def environment(port: int) -> dict[str, str]:
    """Makes AWS's library ask a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _await(port: int, process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not listen")
