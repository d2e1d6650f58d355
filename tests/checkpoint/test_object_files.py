"""Uploads through a network that flips bits, and to stores that fall silent."""

from collections.abc import Callable, Iterator

import fsspec.config
import pytest
import torch

from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.objects import ObjectLocation
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from tests.checkpoint.fake_s3 import FakeS3, Request, Silence, asked_at, served_by
from tests.checkpoint.states import State, assert_same

URL = "s3://bucket/run"
PART_BYTES = 5 << 20
PART, METADATA, SHARDS, MANIFEST = "partNumber=2", ".metadata", "shards.json", "manifest.json"


@pytest.fixture(scope="module")
def serving() -> Iterator[FakeS3]:
    """The store that this process asks for S3."""
    with served_by(FakeS3()) as running:
        yield running


@pytest.fixture
def store(serving: FakeS3) -> FakeS3:
    """An empty one."""
    vars(serving).update(vars(FakeS3(port=serving.port)))
    return serving


def large(step: int) -> State:
    """A state of two parts."""
    return State(step, {"model.large": torch.arange(2 << 20, dtype=torch.int32) + step})


def saved(url: str, step: int) -> None:
    save(large(step), ObjectLocation(url, part_bytes=PART_BYTES))


def assert_loads(url: str, step: int) -> None:
    state = large(0)
    assert load(state, url)
    assert state.step == step
    assert_same(state.held, large(step).held)


def flipping(what: str) -> Callable[[Request], bytes]:
    """Changes a bit of the requests that send an object whose URL holds `what`."""

    def take(request: Request) -> bytes:
        if not request.puts(what):
            return request.body
        return request.body[:100] + bytes([request.body[100] ^ 1]) + request.body[101:]

    return take


@pytest.mark.parametrize("what", [PART, METADATA, MANIFEST])
def test_a_save_is_not_acknowledged_while_bits_flip_on_their_way(store, what):
    saved(URL, 1)
    store.compares, store.take = True, flipping(what)
    with pytest.raises(CheckpointError, match="a bit changed on its way to the store"):
        saved(URL, 2)
    store.take = lambda request: request.body
    assert [step for step, _ in location_of(URL).list_checkpoints()] == [1]
    assert_loads(URL, 1)
    saved(URL, 2)
    assert_loads(URL, 2)


@pytest.mark.parametrize("what", [SHARDS, MANIFEST])
def test_bytes_that_differ_from_the_checksum_of_the_store_lead_to_an_older_checkpoint(store, what):
    saved(URL, 1)
    saved(URL, 2)
    (name,) = (name for name in store.objects if name.endswith(what) and "step-00000002" in name)
    store.objects[name] = b" " + store.objects[name][1:]
    assert_loads(URL, 1)


@pytest.mark.parametrize("what", ["?uploads", MANIFEST])
def test_a_save_to_a_store_that_falls_silent_ends(store, what, monkeypatch):
    def hear(request: Request) -> None:
        if what in f"{request.method} {request.target}":
            raise Silence

    saved(URL, 1)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.1}})
    with asked_at(store.port):
        store.hear = hear
        with pytest.raises(CheckpointError, match="the store does not answer"):
            saved(URL, 2)
        store.hear = lambda request: None
        assert_loads(URL, 1)
