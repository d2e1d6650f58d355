"""Saves to stores that fall silent."""

import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from fullshard.checkpoint.load import load
from fullshard.checkpoint.objects import ObjectPlace
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from tests.checkpoint.fake_s3 import FakeS3, Request, Silence, asked_at, served_by
from tests.checkpoint.states import State, assert_same

URL = "s3://bucket/run"
PART_BYTES = 5 << 20
MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def serving() -> Iterator[FakeS3]:
    """The store that this process asks for S3."""
    with served_by(FakeS3()) as running:
        yield running


@pytest.fixture
def store(serving: FakeS3) -> FakeS3:
    """An empty one."""
    vars(serving).update(vars(FakeS3()))
    return serving


def large(step: int) -> State:
    """A state of two parts."""
    return State(step, {"model.large": torch.arange(40_000, dtype=torch.int32) + step})


def saved(url: str, step: int) -> None:
    save(large(step), ObjectPlace(url, part_bytes=PART_BYTES))


def assert_loads(url: str, step: int) -> None:
    state = large(0)
    assert load(state, url)
    assert state.step == step
    assert_same(state.held, large(step).held)


def silent(what: str) -> Callable[[Request], None]:
    def hear(request: Request) -> None:
        if what in f"{request.method} {request.target}":
            raise Silence

    return hear


@pytest.mark.parametrize("what", ["", MANIFEST])
def test_a_save_to_a_store_that_falls_silent_ends(store, what):
    saved(URL, 1)
    store.hear = silent(what)
    with pytest.raises(CheckpointError, match="the store does not answer") as raised:
        save(large(2), ObjectPlace(URL, part_bytes=PART_BYTES, answer_seconds=0.3))
    assert "no answer within" in str(raised.value)
    assert "checkpoint.store_seconds" in str(raised.value)
    store.hear = silent("nothing")
    assert_loads(URL, 1)


def test_a_store_that_takes_connections_and_never_reads_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server, asked_at(server.getsockname()[1]):
        place = ObjectPlace(URL, answer_seconds=0.3)
        with pytest.raises(CheckpointError, match="the store does not answer"):
            load(large(0), place)
