"""A load takes the newest whole checkpoint or refuses; it never starts over in silence."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.location import latest_checkpoint
from fullshard.checkpoint.manifest import FORMAT, SavedFile, read_manifest
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from fullshard.system.files import xxh3_digest
from tests.checkpoint.states import (
    State,
    assert_same,
    loaded,
    mixed,
    numbers,
    saved,
    saved_sharded,
    sharded,
    table_of,
)
from tests.checkpoint.test_verify import flip


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def set_step_of_manifest(text: bytes) -> bytes:
    return json.dumps(json.loads(text) | {"step": 5}).encode()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "directory as manifest": lambda path: [act(path / "manifest.json") for act in (Path.unlink, Path.mkdir)],
    "half a manifest": lambda path: rewrite(path / "manifest.json", lambda text: text[: len(text) // 2]),
    "manifest of another form": lambda path: rewrite(
        path / "manifest.json", lambda _: b'{"format": 2, "step": "many"}'
    ),
    "manifest of another step": lambda path: rewrite(path / "manifest.json", set_step_of_manifest),
    "truncated shard": lambda path: rewrite(path / "__0_0.distcp", lambda data: data[:-1]),
    "no shard": lambda path: (path / "__0_0.distcp").unlink(),
    "empty metadata": lambda path: rewrite(path / ".metadata", lambda _: b""),
}


def still_temporary(path: Path) -> None:
    path.rename(path.with_name(".tmp-00000003-ab"))


@pytest.mark.parametrize("damage", [*DAMAGES.values(), still_temporary], ids=[*DAMAGES, "temporary"])
def test_incomplete_checkpoints_are_passed_over_with_a_warning(
    tmp_path, caplog, damage: Callable[[Path], object]
):
    for step in (1, 2, 3):
        path = saved(tmp_path, step)
    damage(path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    assert caplog.text.count("passing over") == 1
    assert_same(loaded(tmp_path).held, numbers(2))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_if_all_checkpoints_are_damaged_missing_ok_does_not_start_anew(
    tmp_path, damage: Callable[[Path], object]
):
    damage(saved(tmp_path, 1))
    state = State(0, numbers(0))
    with pytest.raises(CheckpointError, match="none of the checkpoints .* is whole") as raised:
        load(state, tmp_path, missing_ok=True)
    assert raised.value.got == "step-00000001"
    assert_same(state.held, numbers(0))


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    manifest = read_manifest(path).model_copy(update={"format": FORMAT + 1})
    (path / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(CheckpointError, match="cannot be read by this fullshard"):
        loaded(tmp_path)


def test_no_checkpoint_is_refused_except_with_missing_ok(tmp_path):
    still_temporary(saved(tmp_path / "one", 3))  # an interrupted first save is no checkpoint
    for directory in (tmp_path / "absent", tmp_path, tmp_path / "one"):
        state = State(0, numbers(0))
        assert not load(state, directory, missing_ok=True)
        assert state.step == 0
        with pytest.raises(CheckpointError, match=f"no checkpoint in {directory}"):
            load(state, directory)


def test_a_named_checkpoint_is_loaded_or_refused(tmp_path, caplog):
    path = saved(tmp_path, 1)
    saved(tmp_path, 2)
    with caplog.at_level(logging.INFO, logger="fullshard"):
        assert loaded(path).step == 1
    assert f"loaded step 1 from {path}" in caplog.messages
    DAMAGES["no manifest"](path)
    with pytest.raises(CheckpointError, match=f"{path} is not a complete checkpoint"):
        load(State(0, numbers()), path, missing_ok=True)


def test_a_file_is_no_directory_of_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a directory of checkpoints"):
        load(State(0, numbers()), tmp_path / "file", missing_ok=True)


def test_steps_are_compared_as_numbers(tmp_path):
    saved(tmp_path, 99_999_999)
    path = saved(tmp_path, 100_000_000)
    assert latest_checkpoint(tmp_path) == path


def test_another_model_is_refused_by_names(tmp_path):
    saved(tmp_path, 1)
    other = numbers()
    other["model.uneven"] = torch.ones(5, 7)
    other["model.columns"] = other["model.columns"].double()
    other |= {f"model.new{i}": torch.ones(1) for i in range(5)}
    del other["model.scalar"]
    with pytest.raises(CheckpointError) as raised:
        load(State(0, other), tmp_path)
    message = str(raised.value)
    assert "5 tensors missing, 1 not expected, 2 of another shape or dtype" in message
    assert "not in the checkpoint: model.new0, model.new1, model.new2 and 2 more" in message
    assert "only in the checkpoint: model.scalar" in message
    assert "model.uneven is float32 [7, 5] there and float32 [5, 7] here" in message
    assert "model.columns is float32 [3, 6] there and float64 [3, 6] here" in message


class _Careless(State):
    """Does not compare."""

    def load_targets(self, saved: Mapping[str, object]) -> dict[str, torch.Tensor]:
        return dict(self.held)


@pytest.mark.parametrize("tensor", [torch.zeros(7, 5).double(), torch.zeros(5, 7)])
def test_a_target_of_another_shape_or_dtype_is_refused(tmp_path, tensor):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="1 of another shape or dtype"):
        load(_Careless(0, {"model.uneven": tensor}), tmp_path)
    with pytest.raises(CheckpointError, match="1 tensor missing"):
        load(_Careless(0, {"model.absent": tensor}), tmp_path)


class _Refuses(State):
    def load_targets(self, saved: Mapping[str, object]) -> dict[str, torch.Tensor]:
        raise CheckpointError("not here.", got="this", fix="that") if dist.get_rank() else KeyError("name")


class _RefusesValues(State):
    def load_values(self, values: Mapping[str, object], received: Mapping[str, object]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such optimizer")


def refused(kind: type[State], directory: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load(kind(0, sharded(0, (2,))), directory)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Refuses, "rank 0: loading {} failed.\n  got: KeyError: 'name'"),
        (_RefusesValues, "rank 1: loading {} failed.\n  got: ValueError: no such optimizer"),
    ],
)
def test_a_rank_that_fails_fails_all(ranks, tmp_path, kind, message):
    path = saved(tmp_path, 1)
    assert ranks(2).run(refused, kind, tmp_path) == [message.format(path)] * 2


def load_from_a_directory_per_rank(directory: Path) -> str:
    os.chdir(directory / str(dist.get_rank()))
    with pytest.raises(CheckpointError) as raised:
        load(State(0, numbers(0)), "checkpoints")
    return str(raised.value)


def test_a_rank_that_cannot_see_the_checkpoint_fails_all(ranks, tmp_path):
    (tmp_path / "1").mkdir()
    saved(tmp_path / "0" / "checkpoints", 1)
    messages = ranks(2).run(load_from_a_directory_per_rank, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "rank 1: checkpoints/step-00000001 is not whole.\n  got: __0_0.distcp: No such file"
    )


def save_two_parts(directory: Path) -> None:
    save(State(1, {f"model.rank{dist.get_rank()}": torch.ones(3)}), directory)


def refused_parts(directory: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load(State(0, {f"model.rank{dist.get_rank()}": torch.ones(3)}), directory)
    return str(raised.value)


def test_a_shard_that_one_rank_cannot_read_fails_all(ranks, tmp_path):
    ranks(2).run(save_two_parts, tmp_path)
    path = tmp_path / "step-00000001"
    begin = table_of(path, "__1_0.distcp").pieces_bytes
    rewrite(path / "__1_0.distcp", lambda data: bytes(begin) + data[begin:])
    messages = ranks(2).run(refused_parts, tmp_path)
    assert messages[0] == messages[1]
    assert "none of the checkpoints" in messages[0]
    assert "got: step-00000001: a part of model.rank1, bytes 0 to" in messages[0]


def sign(path: Path) -> None:
    """Rewrites a checkpoint as an earlier version saved it with a key: BLAKE2b digests and a signature."""
    manifest, table = read_manifest(path), table_of(path)
    data = (path / "__0_0.distcp").read_bytes()[: table.pieces_bytes]
    (path / "__0_0.distcp").write_bytes(data)
    pieces = [(one, data[one.offset : one.offset + one.length]) for one in table.pieces]
    strong = [one.model_copy(update={"digests": (blake2b(part),)}) for one, part in pieces]
    text = table.model_copy(update={"pieces": tuple(strong)}).model_dump_json().encode()
    (path / "__0_0.distcp.pieces").write_bytes(text)
    files = {"__0_0.distcp": SavedFile(size_bytes=len(data))}
    files["__0_0.distcp.pieces"] = SavedFile(size_bytes=len(text), digest=blake2b(text))
    manifest = manifest.model_copy(update={"format": 2, "files": manifest.files | files})
    text = manifest.model_copy(update={"digest": "0" * 32}).model_dump_json(indent=1).encode()
    text = text.replace(b' "digest": "0000', b' "signature": "' + b"1" * 64 + b'",\n "digest": "0000')
    (path / "manifest.json").write_bytes(text.replace(b"0" * 32, xxh3_digest(text).encode()))


def blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def test_signed_checkpoints_of_earlier_versions_are_verified_and_loaded(tmp_path):
    path = saved(tmp_path, 1)
    sign(path)
    assert not list(iterate_damage(path))
    assert_same(loaded(tmp_path).held, numbers(1))
    flip(path / "__0_0.distcp", 8 * 1000)
    assert [one.file for one in iterate_damage(path)] == ["__0_0.distcp"]


def write_manifest_of_node(path: Path, node: int, nodes: int) -> None:
    """Rewrites the manifest of one or two ranks as an earlier version wrote it on the disk of a node."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name, file in manifest["files"].items():
        file["node"] = None if nodes == 1 or name == "shards.json" else int(name.startswith("__1"))
    if nodes > 1:
        del manifest["files"]["writer.json"]
        manifest["attempt"] = "0a1b2c3d"
    del manifest["digest"]
    text = json.dumps(manifest | {"nodes": nodes, "node": node, "digest": "0" * 32})
    (path / "manifest.json").write_text(text.replace("0" * 32, xxh3_digest(text.encode())))


def test_checkpoints_of_disks_that_nodes_did_not_share_are_refused_and_stay(ranks, tmp_path):
    (path, _) = ranks(2).run(saved_sharded, tmp_path, 3, (2,))
    write_manifest_of_node(path, 1, nodes=2)
    for act in (lambda: loaded(tmp_path), lambda: list(iterate_damage(path))):
        with pytest.raises(CheckpointError, match="disks that nodes do not share"):
            act()
    assert path.exists()


def test_a_manifest_that_names_its_one_node_is_read_as_any_other(tmp_path):
    path = saved(tmp_path, 3)
    manifest = read_manifest(path)
    write_manifest_of_node(path, 0, nodes=1)
    assert read_manifest(path).files == manifest.files
    assert not list(iterate_damage(path))
    assert_same(loaded(tmp_path).held, numbers(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_large_tensors_load_with_the_padding_before_them(tmp_path):
    path = save(State(3, mixed()), tmp_path)
    assert not list(iterate_damage(path))
    state = State(0, {name: torch.zeros_like(tensor) for name, tensor in mixed().items()})
    assert load(state, tmp_path)
    assert_same(state.held, mixed())
    alone = {name: torch.zeros_like(tensor) for name, tensor in mixed().items()}
    dcp.load(alone, checkpoint_id=path, no_dist=True)
    assert_same(alone, mixed())
