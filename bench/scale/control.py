"""Process groups, the store in which ranks meet, the watchdog, and what every rank does per window."""

import multiprocessing
import os
import pickle
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from math import log2, prod
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

import fullshard as fs
from bench.scale.measure import Case, Row, fit_growth, measured
from fullshard.checkpoint.background import BackgroundSaver
from fullshard.distributed import agreement as agreement_module
from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.loopback import LOOPBACK, set_connection_variables, start_store_on_loopback
from fullshard.distributed.owners import find_layouts
from fullshard.distributed.ranges import OwnWorkClock
from fullshard.distributed.unit_order import UnitEvents
from fullshard.models.decoder import DecoderModel
from fullshard.observe.run_log import RunLog
from fullshard.observe.stragglers import StragglerWatch
from fullshard.parallel import mesh
from fullshard.spec.dealing import deal_matrices
from fullshard.spec.settings.train_section import FaultToleranceSection
from fullshard.survival import diagnosis, fingerprint, watchdog
from fullshard.survival.phase import Heartbeat, PhaseTracker, RunPhase
from fullshard.survival.status_board import StatusBoard
from fullshard.survival.store_rows import append_row

REAL_RANKS, MEETING_SECONDS = (4, 8, 16, 24), 600
STORE_REQUESTS_PER_SECOND = 65_000
"""Measured with a TCPStore on loopback, small values, one to four clients."""
LOG_EVERY = 10
BLOCKS = 126
SIZES = "vocabulary=128256 d_model=16384 heads=128 kv_heads=8 d_ff=53248 max_sequence=8192"
assert fake_pg, "imported for its effect"


class CountingStore(dist.Store):
    """A store that counts the requests of this rank. A request repeated while waiting counts once."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._asked = store, list[tuple[str, object]]()

    def take_requests(self) -> int:
        """Returns the number of requests since the last call."""
        asked, self._asked = self._asked, []
        return len(set(asked))

    def _ask(self, name: str, *arguments: Any) -> Any:
        key = arguments[0] if isinstance(arguments[0], str) else tuple(arguments[0])
        self._asked.append((name, key))
        return getattr(self._store, name)(*arguments)

    def clone(self) -> dist.Store:
        return self

    def has_extended_api(self) -> bool:
        return True


def _counted(name: str) -> Callable[..., Any]:
    return lambda store, *arguments: store._ask(name, *arguments)


for _request in [
    "set",
    "compare_set",
    "get",
    "add",
    "check",
    "wait",
    "multi_get",
    "multi_set",
    "delete_key",
    "append",
]:
    setattr(CountingStore, _request, _counted(_request))


def open_fake_group(ranks: int, *, rank: int = 0, store: dist.Store | None = None) -> None:
    """Opens a default group of `ranks`, whose collectives copy this rank's input to all outputs."""
    dist.init_process_group("fake", store=store or dist.HashStore(), rank=rank, world_size=ranks)

    def gather_copies(value: Any, *, group: object) -> list[Any]:
        return [pickle.loads(one) for one in [pickle.dumps(value)] * ranks]

    agreement_module.all_gather_pickled = gather_copies  # torch's fake group receives nothing
    agreement_module.all_reduce_largest = lambda own, *, group: [*own]


def plan_of(ranks: int, *more: str) -> fs.Plan:
    """Returns a plan of one sequence per rank, on the CPU."""
    sizes = [f"model.{one}" for one in SIZES.split()]
    run = fs.Run.load(overrides=[*sizes, f"train.global_batch={ranks}", *more])
    return fs.Plan.from_run(run, world_size=ranks, device="cpu")


def start(ranks: int, _: int) -> list[Row]:
    """Opens the groups of a run on GPUs, with saves in the background, among a few real ranks."""
    every = _fit_requests()(ranks)
    most = 8 * ranks * log2(ranks)
    return [
        Row("start: requests to the store", ranks, 0, every, "req", most_amount=most, is_derived=True),
        Row("start: seconds of the store", ranks, 0, every / STORE_REQUESTS_PER_SECOND, "s", is_derived=True),
    ]


@cache
def _fit_requests() -> Callable[[int], float]:
    return fit_growth({n: float(sum(count_requests_of_ranks(n))) for n in REAL_RANKS})


def count_requests_of_ranks(ranks: int) -> list[int]:
    """Returns the requests of each of `ranks` forked processes, which end once all have sent their counts."""
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    pipes = [fork.Pipe() for _ in range(ranks)]
    children = [
        fork.Process(target=_send_requests_of_start, args=(to, rank, ranks, port))
        for rank, (_, to) in enumerate(pipes)
    ]
    for one in children:
        one.start()
    try:
        return [ours.recv() for ours, _ in pipes]
    finally:
        for one in children:
            one.kill()
            one.join()


def _send_requests_of_start(to: Connection, rank: int, ranks: int, port: int) -> None:
    """Starts as a rank with a GPU does, with torch's fake group in place of NCCL."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % 4)}
    os.environ |= {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    connect, open_group, stores = dist.TCPStore, dist.init_process_group, list[CountingStore]()

    def connect_counting(*arguments: Any, **named: Any) -> dist.Store:
        stores.append(CountingStore(connect(*arguments, **named)))
        return stores[-1]

    def open_without_nccl(backend: str, *, device_id: object, **named: Any) -> None:
        open_group(backend.replace("nccl", "fake"), **named)

    dist.TCPStore, dist.init_process_group = connect_counting, open_without_nccl  # type: ignore[misc]
    with set_connection_variables():
        mesh._init_process_group(torch.device("cuda", 0), timedelta(seconds=MEETING_SECONDS))
        saver = BackgroundSaver(f"/nowhere/{port}")
    to.send(sum(one.take_requests() for one in stores))
    time.sleep(MEETING_SECONDS)  # the parent ends it
    del saver


def groups(ranks: int, _: int) -> list[Row]:
    """Builds the meshes and groups of a hybrid plan with tensor parallelism."""
    open_fake_group(ranks)
    sharding = ["sharding.strategy=hybrid_shard", f"sharding.shard_degree={ranks // 64}"]
    plan = plan_of(ranks, *sharding, "sharding.tensor_parallel=8")
    nodes = [f"node{rank // 8}" for rank in range(ranks)]
    across = [range(first, first + 8) for first in range(0, ranks, 8)]
    with measured() as found:
        mesh.build_mesh(plan)
        mesh.build_axis_group(plan, "tensor")
        mesh.find_group_across_nodes(across, hosts=nodes)
    return [Row("start: mesh, tensor groups", ranks, found.seconds, most_seconds=10)]


def shard(ranks: int, blocks: int) -> list[Row]:
    """Shards blocks of 405B parameters, of which this rank allocates its own shards."""
    open_fake_group(ranks)
    plan = plan_of(ranks, "sharding.strategy=full_shard", f"model.layers={blocks}")
    with torch.device("meta"):
        small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        model = nn.Sequential(*DecoderModel(plan.run.decoder_config).blocks)
    fs.shard(small, plan, init="none")  # imports what the first call imports
    with measured() as found:
        fs.shard(model, plan, init="none")
    return [Row("start: shard()", ranks, found.seconds, most_seconds=10)]


def agreement(ranks: int, _: int) -> list[Row]:
    """Gathers a small object of each rank, as a save does several times."""
    open_fake_group(ranks)
    with measured() as found:
        all_gather_object({"step": 1, "digest": "0" * 64})
    return [Row("gather of small objects", ranks, found.seconds, found.peak, most_seconds=1)]


def windows(ranks: int, _: int) -> list[Row]:
    """Judges a window of steps on every rank: stragglers and memory."""
    open_fake_group(ranks)
    watch = StragglerWatch(OwnWorkClock(), log=RunLog(every=LOG_EVERY), device=torch.device("cpu"))
    for step in range(1, 2 * LOG_EVERY):  # a whole window before, as a warmup
        watch.observe_step(step)
    with measured() as found:
        for step in range(2 * LOG_EVERY, 3 * LOG_EVERY):
            watch.observe_step(step)
    most = 1e-3 * LOG_EVERY
    return [Row("window of 10 steps", ranks, found.seconds, most_seconds=most)]


def _heartbeat(step: int = 7) -> Heartbeat:
    return Heartbeat("node", os.getpid(), step, RunPhase.BACKWARD, 301.0, 300.0, time.time())


def heartbeats(ranks: int, _: int) -> list[Row]:
    """Counts the requests of a rank's watchdog in one of its ticks."""
    store = CountingStore(dist.HashStore())
    open_fake_group(ranks, store=store)
    watching = watchdog._Watchdog(
        PhaseTracker(), FaultToleranceSection(), grace_seconds=None, slack_seconds=0
    )
    store.take_requests()
    watching._publish_heartbeat()
    rate = ranks * store.take_requests() / watching._tick
    most = STORE_REQUESTS_PER_SECOND / 2
    return [Row("heartbeats of all ranks", ranks, 0, rate, "req/s", most_amount=most)]


def verdict(ranks: int, _: int) -> list[Row]:
    """Reads the reports of all ranks at a hang, of which one is elsewhere, and names it. In wall seconds."""
    board = StatusBoard(start_store_on_loopback(), rank=0, world_size=ranks, answer_seconds=10.0)
    culprit = ranks // 3
    waiting = diagnosis.RankReport(_heartbeat(), True, "loop.py:1 in step", "gloo:all_reduce 17")
    moved = replace(waiting, waits=False, place="user.py:9 in forward", collective="")
    for board.rank in range(ranks):
        board.publish_heartbeat(_heartbeat(), is_slow=False)
        board.publish_report(moved if board.rank == culprit else waiting)
    board.rank = 0
    with measured() as found:
        what = watchdog.diagnose_from_reports(board, waiting, grace_seconds=8.0).error.what
    problem = "" if f"rank {culprit} " in what else f"named another: {what}"
    operation = "verdict at a hang (wall s)"
    return [Row(operation, ranks, found.seconds, found.wall, "s", most_amount=10, problem=problem)]


def fingerprints(ranks: int, _: int) -> list[Row]:
    """Exchanges fingerprints after a mismatch: as the rank that reads those of all, and as another."""
    store = CountingStore(start_store_on_loopback())
    own, events = fingerprint.StepFingerprint(7, 30, 12345, 67890), UnitEvents((), array("q"))
    for other in range(2, ranks):
        append_row(store, f"{other},7,{30 + other % 2},12345,67890\n", key="reported")
    append_row(store, "1,7,31,12345,67890\n", key="reported")
    store.add("readers", ranks - 1)  # no rank waits for the others
    requests, seconds = list[int](), list[float]()
    for rank in (0, 1):
        store.take_requests()
        with measured() as found:
            fingerprint.exchange_mismatch(
                own, store, rank=rank, world_size=ranks, events=events, answer_seconds=1.0
            )
        requests.append(store.take_requests())
        seconds.append(found.seconds)
    of_all = requests[0] + (ranks - 1) * requests[1]
    most = 8 * ranks * log2(ranks)
    return [
        Row("fingerprint mismatch", ranks, max(seconds), of_all, "req", most_seconds=10, most_amount=most)
    ]


def owners(ranks: int, blocks: int) -> list[Row]:
    """Finds which parts of matrices the ranks have, and deals them, as the first update of Muon does."""
    open_fake_group(ranks)
    shards, width, wide = init_device_mesh("cpu", (ranks,)), 16384, 53248
    of_block = [(width, width)] * 2 + [(1024, width)] * 2 + [(wide, width)] * 2 + [(width, wide)]
    matrices = [
        DTensor.from_local(
            torch.empty(min(1, rows // ranks), columns, device="meta"),
            shards,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((rows, columns)),
            stride=(columns, 1),
        )
        for rows, columns in of_block * blocks
    ]
    with measured() as dealing:
        deal_matrices(find_layouts(matrices), rank=0, cost=prod)
    return [Row("muon: owners (each rank)", ranks, dealing.seconds, dealing.peak, most_seconds=5)]


CONTROL_CASES = [
    Case("start", start, is_isolated=False),
    Case("groups", groups),
    Case("shard", shard, parts=BLOCKS, least=2),
    Case("agreement", agreement),
    Case("windows", windows),
    Case("heartbeats", heartbeats),
    Case("verdict", verdict),
    Case("fingerprints", fingerprints),
    Case("owners", owners, parts=BLOCKS, least=BLOCKS),
]
