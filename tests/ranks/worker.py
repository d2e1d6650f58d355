"""A rank of the pool: takes a function, runs it inside a fresh world, answers, cleans up."""

import functools
import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

from fullshard.parallel.mesh import forget_groups

# A rank that fails mostly takes the others with it at once, for their connections break; they get so long.
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Call:
    """`function` holds the pickled `(function, args)`; `store` is a path that does not exist yet."""

    function: bytes
    rank: int
    world_size: int
    store: str
    timeout_seconds: float


@dataclass(frozen=True)
class Failure:
    """`error` is the pickled exception, or None where it cannot be pickled; `at` is on the machine's clock.

    One rank's failure breaks the connections of the others, whose errors may arrive before its own.
    """

    at: float
    error: bytes | None
    summary: str
    trace: str


def serve(connection: Connection) -> None:
    """Answers calls until the pool closes its end. The body of a worker process."""
    os.setsid()  # Ctrl-C is for pytest; we end with it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _let_others_finish()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo asks the resolver for this host's name
    environ, directory = dict(os.environ), os.getcwd()
    gc.freeze()  # what is imported stays: 300,000 objects that each call's collection would go through
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _reset(environ, directory)
        with _world(call) as store:
            answer = _answer(call)
            connection.send_bytes(pickle.dumps(answer))
            if isinstance(answer, Failure):
                store.add("finished", 1)  # and leaves at once, which ends what the others wait for
            else:
                _await_all(store, "finished", call.world_size)


def _let_others_finish() -> None:
    """No thread takes the processor from another one of a rank just because it was woken.

    gloo's thread is woken when bytes come. Where it then takes the processor from a thread that holds the
    connection's lock, it asks for that lock again and again, for all of its time slice.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _die_with_parent() -> None:
    """A rank that waits in a collective would not notice that nobody reads its answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by the pool"
    parent.join()
    os._exit(1)


def _answer(call: Call) -> bytes | Failure:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        warnings.filterwarnings("error", module=r"(fullshard|tests)\b")
        try:
            function, args = pickle.loads(call.function)
            return pickle.dumps(function(*args))
        except BaseException as error:  # whatever a test raises, SystemExit too, is the pool's to show
            return _failure(error, at=time.monotonic())


@contextmanager
def _world(call: Call) -> Iterator[dist.Store]:
    os.environ |= {
        "RANK": str(call.rank),
        "LOCAL_RANK": str(call.rank),
        "WORLD_SIZE": str(call.world_size),
        "LOCAL_WORLD_SIZE": str(call.world_size),
    }
    store = dist.FileStore(call.store, call.world_size)
    timeout = timedelta(seconds=call.timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)
    _await_all(store, "connected", call.world_size)
    yield store
    if dist.is_initialized():  # a test may have ended it itself
        dist.destroy_process_group()
    _forget()


def _await_all(store: dist.Store, what: str, world_size: int) -> None:
    """Waits a while for the others: a rank that ends its world breaks what they still do in theirs."""
    deadline = time.monotonic() + GRACE_SECONDS
    store.add(what, 1)
    while store.add(what, 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.002)


def _failure(error: BaseException, *, at: float) -> Failure:
    trace = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # an exception with an __init__ of its own may fail only here
    except (TypeError, AttributeError, pickle.PicklingError):
        pickled = None
    return Failure(at, pickled, summary, trace)


def _reset(environ: Mapping[str, str], directory: str) -> None:
    """Puts back what a test can leave behind; the world itself is new for every call."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _forget() -> None:
    """Lets go of the world that ended. What still holds its groups (a model, in cycles) holds their
    connections too, and the others would wait in theirs for a rank that has failed."""
    forget_groups()
    _clear_caches()
    gc.collect()


def _clear_caches() -> None:
    """DTensor caches meshes of ended worlds, which compare equal to new ones but name dead groups."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for place in (module, *classes):
                _clear_caches_in(place)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in torch 2.11
            _redistribute.clear_redistribute_planner_cache()


def _clear_caches_in(place: object) -> None:
    for value in list(vars(place).values()):
        function = getattr(value, "__func__", value)  # a staticmethod holds it there
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()
