"""Ranks that fail exchange what they know over one store with few requests, however many ranks there are."""

import json
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.distributed.unit_order import UnitAndParameterNames, UnitEvents
from fullshard.quantities import leave_out_middle, rank_list_text
from fullshard.survival.diagnosis import RankReport, UnresponsiveRank, diagnose_hang
from fullshard.survival.fingerprint import (
    Mismatch,
    StepFingerprint,
    exchange_mismatch,
    find_mismatch,
    publish_fingerprint,
    publish_mismatch,
)
from fullshard.survival.phase import Heartbeat
from fullshard.survival.status_board import StatusBoard
from fullshard.survival.watchdog import diagnose_from_reports

SEEN = Heartbeat("elsewhere", 1, 4, "forward", 31.0, 30.0, 0.0)


class CountingStore:
    """A store of one process, which counts the keys that are looked up. A key that is missing fails."""

    def __init__(self) -> None:
        self.store, self.looked_up = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        self.looked_up += len(keys)
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        self.looked_up += 1
        assert self.store.check([key]), key
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.looked_up += len(keys)
        assert self.store.check(keys)
        return self.store.multi_get(keys)


def report(rank: int) -> RankReport:
    return RankReport(replace(SEEN, process=rank), rank != 5, f"model.py:{rank} in f", "")


@pytest.mark.parametrize("silent", [set(), {0, 700, 701}, {*range(100, 1100)}])
def test_one_rank_reads_the_reports_of_all_at_once_and_of_silent_ranks_their_last_heartbeat(
    silent: set[int],
) -> None:
    store: Any = CountingStore()
    boards = [StatusBoard(store, rank=rank, world_size=1500, answer_seconds=60) for rank in range(1500)]
    known = {rank: report(rank) for rank in range(1500) if rank not in silent}
    for rank, board in enumerate(boards):
        if rank != 700:
            board.publish_heartbeat(report(rank).seen, is_slow=False)
        if rank in known:
            board.publish_report(known[rank])
    store.looked_up = 0
    verdict = diagnose_from_reports(boards[5], known[5], grace_seconds=0)
    assert store.looked_up <= 1 + 6 * len(silent)
    heartbeats = {rank: None if rank == 700 else report(rank).seen for rank in silent}
    unresponsive = {rank: UnresponsiveRank(one, None) for rank, one in heartbeats.items()}
    whole = diagnose_hang(known, unresponsive, now=time.time())
    assert (verdict.error.what, verdict.shown) == (whole.error.what, whole.shown)
    assert len(str(verdict.error)) < 10_000, "however many places and gaps there are"
    boards[5].publish_verdict(verdict)
    read = boards[9].wait_for_verdict_and_count_reader(1.0)
    assert read is not None
    assert (str(read.error), read.shown) == (str(verdict.error), verdict.shown)
    assert boards[5].count_verdict_readers() == 1


def test_the_last_heartbeat_in_a_slow_phase_and_a_request_are_known_to_all() -> None:
    store: Any = CountingStore()
    boards = [StatusBoard(store, rank=rank, world_size=3, answer_seconds=60) for rank in range(3)]
    for at, (slow, last) in enumerate([(None, 0.0), (0, 1.0), (2, 2.0), (None, 2.0)]):
        for rank, board in enumerate(boards):
            assert not board.publish_heartbeat(replace(SEEN, at=float(at)), is_slow=rank == slow)
        assert {board.find_slow_heartbeat_time() for board in boards} == {last}
    assert [board.request_reports_and_return_if_first(0) for board in boards] == [True, False, False]
    assert boards[2].publish_heartbeat(SEEN, is_slow=False)
    assert boards[2].request_reports_and_return_if_first(1), "another judges if the first gives no verdict"


UNITS = [UnitAndParameterNames(f"blocks.{index}", ["weight"]) for index in range(3)]
kinds = st.sampled_from([(4, 0), (4, 1), (5, 0), None])  # (step, unit); None: in another collective


@given(st.lists(kinds, min_size=2, max_size=12).filter(any))
@settings(max_examples=20)
def test_all_ranks_get_the_texts_of_all_fingerprints_with_few_requests(
    ranks: list[tuple[int, int] | None],
) -> None:
    store: Any = CountingStore()
    events = {rank: UnitEvents(UNITS, array("q", [2 * one[1]])) for rank, one in enumerate(ranks) if one}
    own = {rank: StepFingerprint((ranks[rank] or (0,))[0], 9, 7, events[rank].checksum) for rank in events}

    def exchange(rank: int) -> Mismatch:
        return exchange_mismatch(
            own[rank], store, rank=rank, world_size=len(ranks), events=events[rank], answer_seconds=60
        )

    if None not in ranks:
        with ThreadPoolExecutor(len(own)) as pool:
            found = list(pool.map(exchange, own))
    else:  # those that do not come would be waited for
        for rank, one in own.items():
            publish_fingerprint(one, store, rank=rank, events=events[rank])
        first = events[min(events)]
        publish_mismatch(store, world_size=len(ranks), events=first, answer_seconds=0)
        found = [Mismatch(*json.loads(store.get("texts"))[1:])] * len(own)
    orders = {one.checksum: one.numbers for one in sorted(events.values(), key=lambda one: one.checksum)}
    whole = find_mismatch(own, world_size=len(ranks), events=events[min(events)], orders=orders)
    assert found == [whole] * len(own)
    assert store.looked_up <= len(own) + 4


def test_without_an_answer_a_rank_states_only_what_it_knows() -> None:
    store, events = dist.HashStore(), UnitEvents(UNITS, array("q"))
    store.add("judges", 1)  # a rank that has ended since
    own = StepFingerprint(4, 9, 7, 8)
    found = exchange_mismatch(own, store, rank=1, world_size=3, events=events, answer_seconds=0.01)
    assert found.got.startswith("rank 1: step 4, 9 collectives; the others' are not known")


@given(st.sets(st.integers(0, 3000), min_size=1))
def test_a_list_of_ranks_is_short_and_names_the_first_and_the_last(ranks: set[int]) -> None:
    text = rank_list_text(sorted(ranks))
    assert len(text) < 500
    assert text.split()[1].startswith(str(min(ranks)))
    assert text.endswith(str(max(ranks)))


@given(st.integers(0, 100))
def test_texts_are_left_out_in_the_middle_only(count: int) -> None:
    texts = [str(number) for number in range(count)]
    shown = leave_out_middle(texts)
    assert [*shown[:16], *shown[-16:]] == [*texts[:16], *texts[-16:]]
    assert shown[16:-16] == ([f"… ({count - 32} left out)"] if count > 32 else texts[16:-16])
