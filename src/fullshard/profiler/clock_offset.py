"""The difference between the clocks of hosts, so that spans of all ranks can be shown on one axis."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import all_gather_object, has_backend, rank

_EXCHANGES = 15


@dataclass(frozen=True)
class ClockOffset:
    """The ns to add to this rank's clock for that of rank 0, and the largest error of the sum.

    error_ns: half of the shortest round trip; 0 on rank 0's host; None if the clocks could not be compared
    """

    offset_ns: int = 0
    error_ns: int | None = 0


def boot_id() -> str:
    """Returns an identifier of this host's kernel, whose processes share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()


def compare_clocks(host: str | None = None, *, now: Callable[[], int] = time.perf_counter_ns) -> ClockOffset:
    """Returns the offset of this rank's clock. Collective.

    host: identifier of the host; ranks of one host share its clock
    now: this rank's clock, in ns

    As in NTP: a rank per host sends its question to rank 0, which answers with its time. The answer was made
    between both moments, so the middle is wrong by at most half of the round trip. The shortest of several
    exchanges counts.
    """
    hosts = all_gather_object(boot_id() if host is None else host)
    asking = [hosts.index(one) for one in dict.fromkeys(hosts) if one != hosts[0]]
    if not asking:
        return ClockOffset()
    if not has_backend("cpu"):
        return ClockOffset() if hosts[rank()] == hosts[0] else ClockOffset(error_ns=None)
    own = ClockOffset()
    for one in asking:
        if rank() == one:
            own = _ask(now)
        elif rank() == 0:
            _answer(one, now=now)
    every = all_gather_object(own)
    return every[hosts.index(hosts[rank()])]


def _ask(now: Callable[[], int]) -> ClockOffset:
    best: tuple[int, int] | None = None
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_EXCHANGES):
        sent = now()
        dist.send(message, dst=0)
        dist.recv(message, src=0)
        received = now()
        exchange = (received - sent, int(message.item()) - (sent + received) // 2)
        best = exchange if best is None else min(best, exchange)
    assert best is not None, "there is an exchange"
    return ClockOffset(best[1], best[0] // 2 + 1)


def _answer(asking: int, *, now: Callable[[], int]) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_EXCHANGES):
        dist.recv(message, src=asking)
        message[0] = now()
        dist.send(message, dst=asking)
