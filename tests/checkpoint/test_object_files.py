"""Uploads through a network that flips bits, and to stores that report little, or nothing at all."""

import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from fullshard.checkpoint import object_files
from fullshard.checkpoint.files import write_file
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.object_files import ObjectFiles
from fullshard.checkpoint.objects import ObjectLocation
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from tests.checkpoint import flipping_memory
from tests.checkpoint.fake_s3 import FakeS3, Request, Silence, asked_at, served_by
from tests.checkpoint.flipping_memory import FlippingMemory
from tests.checkpoint.states import State, assert_same

URL = "s3://bucket/run"
PART_BYTES = 100_000
PART, METADATA, SHARDS, MANIFEST = "partNumber=2", ".metadata", "shards.json", "manifest.json"


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
    save(large(step), ObjectLocation(url, part_bytes=PART_BYTES))


def assert_loads(url: str, step: int) -> None:
    state = large(0)
    assert load(state, url)
    assert state.step == step
    assert_same(state.held, large(step).held)


def flipping(what: str, *, times: int) -> Callable[[Request], bytes]:
    """Changes a bit of the first `times` requests that send an object whose URL holds `what`."""
    left = [None] * times

    def take(request: Request) -> bytes:
        if not (request.puts(what) and left):
            return request.body
        left.pop()
        return request.body[:100] + bytes([request.body[100] ^ 1]) + request.body[101:]

    return take


@pytest.mark.parametrize("what", [PART, METADATA, "writer.json", MANIFEST])
def test_a_bit_that_flips_on_its_way_is_sent_again(store, what):
    store.take = flipping(what, times=1)
    saved(URL, 1)
    assert sum(one.puts(what) for one in store.asked) > 1
    assert_loads(URL, 1)


@pytest.mark.parametrize("what", [PART, METADATA, MANIFEST])
def test_a_save_is_not_acknowledged_while_bits_flip_on_their_way(store, what):
    saved(URL, 1)
    store.take = flipping(what, times=100)
    with pytest.raises(CheckpointError, match="a bit changed on its way to the store"):
        saved(URL, 2)
    store.take = flipping(what, times=0)
    assert [step for step, _ in location_of(URL).list_checkpoints()] == [1]
    assert_loads(URL, 1)
    saved(URL, 2)
    assert_loads(URL, 2)


def test_what_a_store_refuses_for_its_checksum_is_sent_again(store):
    store.compares, store.take = True, flipping("", times=2)
    saved(URL, 1)
    assert_loads(URL, 1)


def reads(store: FakeS3) -> int:
    """How often the data file was asked for."""
    return sum(one.method == "GET" and one.name.endswith(".distcp") for one in store.asked)


def test_a_store_that_reports_no_md5_is_read_back(store, caplog):
    store.reports = "nothing"
    object_files._warn_objects_are_read_back.cache_clear()
    saved(URL, 1)
    saved(URL, 2)
    assert caplog.text.count("reports no checksum") == 1
    assert reads(store) == 4  # two parts
    assert_loads(URL, 2)


def test_a_flipped_bit_is_found_though_the_store_reports_no_md5(store):
    saved(URL, 1)
    store.reports, store.take = "nothing", flipping(PART, times=100)
    with pytest.raises(CheckpointError, match="bytes 100000 to .* are others than were sent"):
        saved(URL, 2)
    assert_loads(URL, 1)


def test_a_bucket_that_is_encrypted_with_keys_is_believed_its_checksums(store):
    store.reports, store.compares = "keys", True
    saved(URL, 1)
    assert reads(store) == 0
    assert_loads(URL, 1)


@pytest.mark.parametrize("what", [SHARDS, MANIFEST])
def test_an_older_checkpoint_is_loaded_where_bytes_differ_from_the_stores_own_checksum(store, what):
    saved(URL, 1)
    saved(URL, 2)
    (name,) = (name for name in store.objects if name.endswith(what) and "step-00000002" in name)
    store.objects[name] = b" " + store.objects[name][1:]
    assert_loads(URL, 1)


def silent(what: str) -> Callable[[Request], None]:
    def hear(request: Request) -> None:
        if what in f"{request.method} {request.target}":
            raise Silence

    return hear


@pytest.mark.parametrize("what", ["", "?uploads", PART, MANIFEST])
def test_a_save_to_a_store_that_falls_silent_ends(store, what):
    saved(URL, 1)
    store.hear = silent(what)
    with pytest.raises(CheckpointError, match="the store does not answer") as raised:
        save(large(2), ObjectLocation(URL, part_bytes=PART_BYTES, answer_seconds=0.3))
    assert "no answer within" in str(raised.value)
    assert "checkpoint.store_seconds" in str(raised.value)
    store.hear = silent("nothing")
    assert_loads(URL, 1)


def test_a_store_that_takes_connections_and_never_reads_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server, asked_at(server.getsockname()[1]):
        place = ObjectLocation(URL, answer_seconds=0.3)
        with pytest.raises(CheckpointError, match="the store does not answer"):
            load(large(0), place)
        with pytest.raises(OSError, match="no answer within"):
            write_file(ObjectFiles(URL, "attempt", answer_seconds=0.3), "file", data=bytes(1 << 16))


def test_another_store_is_held_to_the_md5_that_it_reports():
    flipping_memory.begin()
    saved(flipping_memory.URL, 1)
    assert not [path for path in FlippingMemory.read if path.endswith(".distcp")]
    flipping_memory.begin(flips=".distcp", on_its_way=True, empty=False)
    with pytest.raises(CheckpointError, match="others than were sent"):
        saved(flipping_memory.URL, 2)
    assert_loads(flipping_memory.URL, 1)


def test_a_store_that_reports_nothing_is_read_back(caplog):
    object_files._warn_objects_are_read_back.cache_clear()
    saved("memory://bucket/run", 1)
    assert caplog.text.count("reports no checksum") == 1
    assert_loads("memory://bucket/run", 1)
