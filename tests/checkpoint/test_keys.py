"""With a key, only what somebody who has the key has written is loaded."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard.checkpoint.digests import KeyFile, xxh3_or_blake2b
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import CheckpointLocation, latest_checkpoint, location_of
from fullshard.checkpoint.manifest import MANIFEST, read_manifest
from fullshard.checkpoint.per_node import NodeLocalDirectory, merge_node_checkpoints
from fullshard.checkpoint.save import save
from fullshard.checkpoint.shard_file import ShardFileTable
from fullshard.checkpoint.verify import iterate_damage
from fullshard.cli.main import main
from fullshard.errors import CheckpointError
from fullshard.weights.export import export
from tests.checkpoint.states import State, assert_same, numbers, saved, sharded
from tests.checkpoint.test_verify import flip


@pytest.fixture
def key(tmp_path) -> Path:
    (tmp_path / "key").write_text("a secret of some length\n")
    (tmp_path / "key").chmod(0o600)
    return tmp_path / "key"


def signed(directory: Path, key: Path) -> CheckpointLocation:
    return location_of(directory, key_file=key)


def load_step(place: CheckpointLocation | Path) -> int:
    state = State(0, numbers(0))
    load(state, place)
    assert_same(state.held, numbers(state.step))
    return state.step


@pytest.mark.parametrize("layout", ["sharded", "ranks"])
def test_a_signed_checkpoint_loads_with_its_key_and_without_one(tmp_path, key, layout):
    place = signed(tmp_path / "checkpoints", key)
    path = Path(save(State(1, numbers(1)), place, layout=layout))
    assert load_step(place) == load_step(tmp_path / "checkpoints") == load_step(signed(path, key)) == 1
    assert not list(iterate_damage(place.list_checkpoints()[0][1]))
    assert key.read_text().strip().encode() not in b"".join(one.read_bytes() for one in path.iterdir())


def test_another_key_or_none_is_refused_and_no_older_checkpoint_is_taken(tmp_path, key):
    (tmp_path / "other").write_text("another secret of some length")
    saved(signed(tmp_path / "checkpoints", key), 1)
    with pytest.raises(CheckpointError, match="is not signed with the key") as raised:
        load_step(signed(tmp_path / "checkpoints", tmp_path / "other"))
    assert "does not fit: another key, or the manifest was changed since" in raised.value.got
    saved(tmp_path / "checkpoints", 2)
    with pytest.raises(CheckpointError, match="step-00000002") as raised:
        load_step(signed(tmp_path / "checkpoints", key))
    assert raised.value.got == "no signature"
    with pytest.raises(CheckpointError, match="is not signed"):
        latest_checkpoint(signed(tmp_path / "checkpoints", key))


def forged_manifest(path: Path) -> None:
    """Another step count, under a digest that anybody can compute."""
    manifest = read_manifest(path)
    forged = manifest.model_copy(update={"values": manifest.values | {"tokens": 7}, "digest": "0" * 32})
    text = forged.model_dump_json(indent=1).encode() + b"\n"
    (path / MANIFEST).write_bytes(text.replace(b"0" * 32, xxh3_or_blake2b(text).encode()))


def forged_table(path: Path) -> None:
    """Other numbers, and a table with digests of these."""
    flip(path / "__0_0.distcp", 8 * 1000)
    table = ShardFileTable.model_validate_json((path / "__0_0.distcp.pieces").read_bytes())
    data = (path / "__0_0.distcp").read_bytes()
    pieces = [
        one.model_copy(
            update={"digests": (xxh3_or_blake2b(data[one.offset : one.offset + one.length], strong=True),)}
        )
        for one in table.pieces
    ]
    forged = table.model_copy(update={"pieces": tuple(pieces)}).model_dump_json().encode()
    (path / "__0_0.distcp.pieces").write_bytes(forged)


@pytest.mark.parametrize("forge", [forged_manifest, forged_table])
def test_what_is_changed_without_the_key_is_not_loaded(tmp_path, key, forge: Callable[[Path], None]):
    place = signed(tmp_path / "checkpoints", key)
    path = Path(saved(place, 1))
    forge(path)
    with suppress(CheckpointError):
        assert list(iterate_damage(place.list_checkpoints()[0][1])), "verify did not see it"
    with pytest.raises(CheckpointError):
        load_step(place)
    with pytest.raises(CheckpointError):
        export(place, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"x" * 5000])
def test_a_file_that_cannot_serve_as_a_key_is_refused_before_anything_is_saved(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(CheckpointError, match="key"):
        location_of(tmp_path / "checkpoints", key_file=tmp_path / "key")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o600, ""), (0o640, "chmod 600"), (0o620, "chmod 600"), (0o604, "chmod 600"), (0o602, "may write it")],
)
def test_a_key_that_others_may_read_is_warned_of_once_and_one_that_all_may_write_is_refused(
    tmp_path, caplog, mode: int, said: str
):
    (tmp_path / "key").write_text("a secret of some length")
    (tmp_path / "key").chmod(mode)
    if mode & 2:
        with pytest.raises(CheckpointError, match=said):
            location_of(tmp_path, key_file=tmp_path / "key")
        return
    for _ in range(2):
        location_of(tmp_path, key_file=tmp_path / "key")
    assert [said in one.message for one in caplog.records] == [True][: bool(said)]


def test_a_fifo_that_nobody_writes_is_no_key_and_a_pipe_with_a_key_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="got: 0 bytes"):
        location_of(tmp_path, key_file=tmp_path / "fifo")
    reading, writing = os.pipe()
    os.write(writing, b"a secret of some length")
    os.close(writing)
    key = location_of(tmp_path, key_file=f"/dev/fd/{reading}").key
    assert key is not None
    assert key.sign(b"") == key.sign(b"")
    os.close(reading)


def test_verify_and_list_name_every_checkpoint_that_is_not_signed_with_the_key(tmp_path, key, capsys):
    saved(signed(tmp_path / "checkpoints", key), 1)
    for verb in ("verify", "list"):
        assert main(["ckpt", verb, str(tmp_path), "--key-file", str(key)]) == 0
    saved(tmp_path / "checkpoints", 2)
    saved(signed(tmp_path / "checkpoints", key), 3)
    capsys.readouterr()
    assert main(["ckpt", "verify", str(tmp_path), "--key-file", str(key)]) == CheckpointError.exit_code
    words = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert words == ["whole", "REFUSED", "whole"]
    assert main(["ckpt", "verify", str(tmp_path), "--json", "--key-file", str(key)]) == 6
    assert [len(many) for many in json.loads(capsys.readouterr().out).values()] == [0, 1, 0]
    assert main(["ckpt", "list", str(tmp_path), "--key-file", str(key)]) == CheckpointError.exit_code
    assert "step-00000002  not whole: no signature" in capsys.readouterr().out


def save_on_nodes(directory: Path, key: Path) -> int:
    disks = NodeLocalDirectory(directory / f"node-{dist.get_rank()}", key=KeyFile(key))
    save(State(3, sharded(3, (2,)), {"tokens": 300}), disks)
    state = State(0, sharded(0, (2,)))
    assert load(state, disks)
    return state.step


def test_nodes_sign_what_they_save_and_what_is_gathered(ranks, tmp_path, key):
    assert ranks(2).run(save_on_nodes, tmp_path, key) == [3, 3]
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    path = merge_node_checkpoints(nodes, tmp_path / "all", key_file=key)
    assert not list(iterate_damage(signed(path, key).root_as_checkpoint()))
    (tmp_path / "other").write_text("another secret of some length")
    with pytest.raises(CheckpointError, match="no step is there of all its nodes"):
        merge_node_checkpoints(nodes, tmp_path / "again", key_file=tmp_path / "other")
