"""Sockets on which a process listens."""

import ipaddress
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LISTENS = "0A"  # man proc_pid_net, include/net/tcp_states.h


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
