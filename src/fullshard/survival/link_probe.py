"""Finds the rank whose link is slow, by exchanges between pairs of ranks.

A slow link makes all ranks wait alike, so no rank's own time shows it. Ranks that come late to a collective
find the data there, so the collectives of training do not show it either. The probe pairs the ranks in turn,
as in a round-robin tournament: each pair exchanges messages, and its shortest round trip counts. A rank is
named if all of its round trips are long beside those of other pairs of the same kind, which are within a host
or between hosts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import all_gather_object, has_backend, rank, world_size

EXCHANGES = {4_096: 12, 1 << 20: 4}
"""Bytes of a message -> number of round trips of each pair: for the latency, and for the bandwidth."""
MOST_ROUNDS = 7  # partners of each rank
LEAST_RANKS = 3  # of two ranks, both have the same link
_LEAST_PARTNERS = 2
RATIO, EXCESS_SECONDS = 3.0, 0.001


@dataclass(frozen=True)
class SlowLink:
    """A rank whose round trips take `seconds` instead of `typical_seconds`."""

    rank: int
    seconds: float
    typical_seconds: float


def probe_links(host: str, *, device: torch.device) -> list[SlowLink]:
    """Returns the ranks whose links are slow. Collective. Takes some milliseconds for each partner."""
    if world_size() < LEAST_RANKS:
        return []
    on = device if device.type == "cpu" or not has_backend("cpu") else torch.device("cpu")
    own: dict[int, dict[int, float]] = {size: {} for size in EXCHANGES}
    for pairs in _rounds(world_size()):
        partner = pairs.get(rank())
        if partner is not None:
            for size, count in EXCHANGES.items():
                own[size][partner] = _shortest_round_trip(partner, size=size, count=count, device=on)
    every = all_gather_object((host, own))
    hosts = [one for one, _ in every]
    for size in EXCHANGES:
        trips = {(a, b): seconds for a, (_, one) in enumerate(every) for b, seconds in one[size].items()}
        if found := find_slow_links(trips, hosts=hosts):
            return found
    return []


def find_slow_links(trips: Mapping[tuple[int, int], float], *, hosts: Sequence[str]) -> list[SlowLink]:
    """Returns the ranks whose round trips are all slow.

    trips: (rank, partner) -> seconds of the shortest round trip
    hosts: the host of each rank
    """
    found: list[SlowLink] = []
    for same in (True, False):
        kind = {pair: took for pair, took in trips.items() if (hosts[pair[0]] == hosts[pair[1]]) == same}
        for one in range(len(hosts)):
            own = [took for pair, took in kind.items() if one in pair]
            others = sorted(took for pair, took in kind.items() if one not in pair)
            if len(own) < _LEAST_PARTNERS or not others:  # of a single pair, either may be slow
                continue
            typical, quickest = others[len(others) // 4], min(own)
            if quickest > RATIO * typical and quickest - typical > EXCESS_SECONDS:
                found.append(SlowLink(one, quickest, typical))
    return found


def _rounds(ranks: int) -> list[dict[int, int]]:
    """Returns rounds of disjoint pairs, as rank -> partner: each rank meets at most MOST_ROUNDS others."""
    seats = ranks + ranks % 2
    rounds: list[dict[int, int]] = []
    for turn in range(min(seats - 1, MOST_ROUNDS)):
        circle = [0, *((turn + index) % (seats - 1) + 1 for index in range(seats - 1))]
        pairs: dict[int, int] = {}
        for a, b in zip(circle[: seats // 2], reversed(circle), strict=False):
            if a < ranks and b < ranks:
                pairs[a], pairs[b] = b, a
        rounds.append(pairs)
    return rounds


def _shortest_round_trip(partner: int, *, size: int, count: int, device: torch.device) -> float:
    """Returns the seconds of the shortest of `count` round trips. The lower rank sends first."""
    message, first = torch.zeros(size, dtype=torch.uint8, device=device), rank() < partner
    shortest = float("inf")
    for _ in range(count):
        started = time.perf_counter()
        for sends in (first, not first):
            _send_or_receive(message, partner, sends=sends)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def _send_or_receive(message: torch.Tensor, partner: int, *, sends: bool) -> None:
    move = dist.isend if sends else dist.irecv
    if message.device.type == "cpu":
        works = [move(message, partner)]
    else:  # a batch of one uses the communicator of all ranks, not a new one of the pair
        works = dist.batch_isend_irecv([dist.P2POp(move, message, partner)])
    for work in works:
        if work is not None:
            work.wait()
