"""A checkpoint from somebody else runs no code, and reaches nothing outside of its own directory."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.manifest import MANIFEST, file_entry, read_manifest
from fullshard.checkpoint.save import save
from fullshard.checkpoint.shard_index import ShardIndex
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.system.files import xxh3_digest
from fullshard.weights.export import export
from tests.checkpoint.states import State, assert_same, loaded, numbers, saved


class _Opens:
    """A pickle of this creates an empty file where it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


def dotted_attack(marker: Path) -> bytes:
    """Protocol 4 lets a global be a path of attributes, here from DCP's module to a function of another."""
    module, name = "torch.distributed.checkpoint.filesystem", "os.mkdir"
    parts = [b"\x80\x04", short_text(module), short_text(name), b"\x93", short_text(str(marker)), b"\x85R."]
    return b"".join(parts)


def short_text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def class_attack(marker: Path) -> bytes:
    """A type that is reachable through DCP's module, and that does something when it is made."""
    module, name = "torch.distributed.checkpoint.filesystem", "io.FileIO"
    parts = [b"\x80\x04", short_text(module), short_text(name), b"\x93"]
    return b"".join([*parts, short_text(str(marker)), short_text("w"), b"\x86R."])


def plain_attack(marker: Path) -> bytes:
    return pickle.dumps(_Opens(marker))


def replace(path: Path, contents: dict[str, bytes]) -> None:
    """Puts other files, or tables of data files, into a checkpoint, with all digests of an attacker."""
    manifest = read_manifest(path)
    files = dict(manifest.files)
    for name, data in contents.items():
        begin = files[name].digest_begin
        (path / name).write_bytes((path / name).read_bytes()[:begin] + data)
        files[name] = file_entry(name, data, begin=begin)
    (path / MANIFEST).write_bytes(manifest.model_copy(update={"files": files}).encode())


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a file left open by the attack
@pytest.mark.parametrize("attack", [dotted_attack, class_attack, plain_attack])
def test_no_pickle_of_a_checkpoint_is_ever_read(tmp_path, attack: Callable[[Path], bytes]):
    marker, path = tmp_path / "marker", saved(tmp_path / "given", 1)
    replace(path, {".metadata": attack(marker)})
    with suppress(Exception):  # the attack works where the pickle is read
        pickle.loads(attack(marker))
    assert marker.exists()
    os.rmdir(marker) if marker.is_dir() else marker.unlink()

    assert_same(loaded(path).held, numbers(1))
    export(path, tmp_path / "model.safetensors")
    assert not list(iterate_damage(path))
    assert not marker.exists()


def rewrite_manifest_text(path: Path, text: str) -> None:
    """Writes a manifest of any text, with the digest that belongs to it."""
    blank = text.replace(read_manifest(path).digest, "0" * 32)
    (path / MANIFEST).write_text(blank.replace("0" * 32, xxh3_digest(blank.encode())))


OUTSIDE = [
    "../../payload",
    "/tmp/payload",
    "..",
    "a/b",
    "a\\\\b",
    "",
    "nul\\u0000",
    "x" * 256,
    "manifest.json",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_name_outside_of_the_directory_is_damage(tmp_path, name):
    path = saved(tmp_path, 1)
    rewrite_manifest_text(path, (path / MANIFEST).read_text().replace('"writer.json"', f'"{name}"'))
    with pytest.raises(DamagedCheckpointError):
        read_manifest(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", "shards.json", MANIFEST])
def test_no_link_is_followed_out_of_a_checkpoint(tmp_path, name):
    saved(tmp_path / "checkpoints", 1)
    path = saved(tmp_path / "checkpoints", 2)
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    ((file, what),) = [(damage.file, damage.what) for damage in iterate_damage(path)]
    assert (file, what.partition(";")[0]) == (name, "a link")
    assert loaded(tmp_path / "checkpoints").step == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", "shards.json", MANIFEST])
def test_a_fifo_is_refused_and_not_read(tmp_path, name):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert [damage.what.partition(";")[0] for damage in iterate_damage(path)] == ["not a regular file"]
    assert loaded(tmp_path).step == 1


def indexes(path: Path) -> Iterator[ShardIndex]:
    """Indexes that do not describe the tensors of the manifest."""
    index = ShardIndex.model_validate_json((path / "shards.json").read_bytes())
    some, others = index.shards["model.uneven"][0], dict(index.shards)
    yield index.model_copy(update={"files": ("../__0_0.distcp",)})
    yield index.model_copy(update={"shards": others | {"model.more": (some,)}})
    del others["model.scalar"]
    yield index.model_copy(update={"shards": others})
    for wrong in (
        some._replace(file=1),
        some._replace(offset=1 << 60),
        some._replace(start=(1, 0)),
        some._replace(shape=(7,)),
        some._replace(shape=(6, 5)),
    ):
        yield index.model_copy(update={"shards": dict(index.shards) | {"model.uneven": (wrong,)}})


def test_an_index_that_does_not_cover_the_tensors_is_damage(tmp_path):
    path = saved(tmp_path, 1)
    for index in indexes(path):
        replace(path, {"shards.json": index.model_dump_json().encode()})
        assert {damage.file for damage in iterate_damage(path)} == {"shards.json"}
        with pytest.raises(CheckpointError):
            load(State(0, numbers(0)), path)


def test_a_manifest_of_more_than_32_mib_is_neither_read_nor_written(tmp_path):
    path = saved(tmp_path / "other", 1)
    os.truncate(path / MANIFEST, (32 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"more than 32\.00 MiB"):
        load(State(0, numbers(0)), path)
    saved(tmp_path / "own", 1)
    with pytest.raises(CheckpointError, match=r"more than 32\.00 MiB"):
        save(State(2, numbers(2), {"long": "x" * (32 << 20)}), tmp_path / "own", keep=1)
    assert loaded(tmp_path / "own").step == 1


Change = Callable[[dict[str, Any]], object]


def shaped(*shape: int) -> dict[str, Change]:
    """Changes after which all files of a checkpoint agree on another shape of model.uneven."""
    name, at = "model.uneven", [0] * len(shape)

    def in_table(table: dict[str, Any]) -> None:
        next(one for one in table["pieces"] if one["name"] == name).update(shape=shape, index=at)

    return {
        MANIFEST: lambda manifest: manifest["tensors"][name].update(shape=shape),
        "shards.json": lambda index: index["shards"].update({name: [[0, 0, at, shape]]}),
        "__0_0.distcp": in_table,
    }


def change_files(path: Path, changes: dict[str, Change]) -> None:
    for name, change in sorted(changes.items(), key=lambda item: item[0] == MANIFEST):
        begin = 0 if name == MANIFEST else read_manifest(path).files[name].digest_begin
        tree = json.loads((path / name).read_bytes()[begin:])
        change(tree)
        data = json.dumps(tree, indent=1) + "\n"
        if name == MANIFEST:
            rewrite_manifest_text(path, data)
        else:
            replace(path, {name: data.encode()})


HUGE = 1 << 50
CLAIMS: dict[str, dict[str, Change]] = {
    "elements in the manifest alone": {MANIFEST: shaped(HUGE)[MANIFEST]},
    "elements": shaped(HUGE),
    "elements of one row": shaped(1, HUGE),
    "dims": shaped(*[1 << 61] * 20_000),
    "padding": {"__0_0.distcp": lambda table: table["pieces"][-1].update(offset=HUGE)},
    "block": {"__0_0.distcp": lambda table: table.update(block_bytes=1 << 30)},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_sizes_that_no_file_has_are_damage_and_nothing_is_allocated(tmp_path, claim):
    path = saved(tmp_path, 1)
    change_files(path, CLAIMS[claim])
    assert [damage.file for damage in iterate_damage(path)] in (
        [MANIFEST],
        ["shards.json"],
        ["__0_0.distcp"],
    )
    for read in (
        lambda: load(State(0, numbers(0)), path),
        lambda: export(path, tmp_path / "model.safetensors"),
    ):
        with pytest.raises(CheckpointError):
            read()


def test_an_export_writes_only_below_its_target(tmp_path):
    path = saved(tmp_path / "given", 1)
    old, new = "model.uneven", "model.../../../outside"

    def rename(tree: dict[str, Any]) -> None:
        for key in {"tensors", "shards"} & tree.keys():
            tree[key][new] = tree[key].pop(old)
        for piece in tree.get("pieces", []):
            piece["name"] = new if piece["name"] == old else piece["name"]

    change_files(path, dict.fromkeys((MANIFEST, "shards.json", "__0_0.distcp"), rename))
    before = {*tmp_path.rglob("*")}
    export(path, tmp_path / "out" / "model.safetensors")
    export(path, tmp_path / "out" / "several", shard_bytes=100)
    made = {*tmp_path.rglob("*")} - before
    assert len(made) > 4
    assert all(one.is_relative_to(tmp_path / "out") for one in made)


def test_an_index_that_points_at_another_tensor_is_damage(tmp_path):
    path = saved(tmp_path, 1)
    index = ShardIndex.model_validate_json((path / "shards.json").read_bytes())
    offset = index.shards["model.everywhere"][0].offset
    shards = index.shards | {"optimizer.count": (index.shards["optimizer.count"][0]._replace(offset=offset),)}
    replace(path, {"shards.json": index.model_copy(update={"shards": shards}).model_dump_json().encode()})
    assert [damage.tensors for damage in iterate_damage(path)] == [("optimizer.count",)]
    with pytest.raises(CheckpointError, match="differ"):
        load(State(0, numbers(0)), path)
