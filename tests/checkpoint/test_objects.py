"""Checkpoints on a real S3 server: whole or absent, and of two writers of a step one wins."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.files import WRITER, ObjectFiles
from fullshard.checkpoint.load import iterate_damage
from fullshard.checkpoint.location import latest_checkpoint, location_of
from fullshard.checkpoint.manifest import MANIFEST, checkpoint_files_at, read_manifest
from fullshard.checkpoint.objects import ObjectLocation, is_attempt_abandoned
from fullshard.checkpoint.save import save
from fullshard.cli.main import main
from fullshard.errors import CheckpointError
from fullshard.system import object_store
from fullshard.system.object_store import ObjectStore
from tests.checkpoint.states import (
    State,
    assert_same,
    loaded,
    loaded_sharded,
    numbers,
    ones_own,
    saved,
    saved_sharded,
)
from tests.checkpoint.store import SECRET, Server, served
from tests.ranks import RankFailed

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
except ImportError:  # an older torch has it under a private name, which newer ones deprecate
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

PART_BYTES = 5 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that this process asks, too."""
    before = dict(os.environ)
    with served(tmp_path_factory.mktemp("server")) as running:
        os.environ.update(running.environment)
        yield running
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def url(server: Server) -> str:
    return server.url("run")


def objects(url: str) -> dict[str, int]:
    """Every object below a prefix, and its bytes."""
    found = ObjectStore(url).list_prefix(url)
    below = {f"{name}/{n}": size for name in found.prefixes for n, size in objects(f"{url}/{name}").items()}
    return {name: one.size_bytes for name, one in found.objects.items()} | below


def flip(url: str, *, at: int) -> None:
    data = bytearray(ObjectStore(url).read_object(url))
    data[at] ^= 1
    ObjectStore(url).remove_objects([url])
    ObjectStore(url).put_new_object(url, data=bytes(data))


def data_file(url: str) -> str:
    """The largest object of a checkpoint."""
    found = objects(url)
    return f"{url}/{max(found, key=lambda name: found[name])}"


def asking(environment: dict[str, str], act: Any, *arguments: Any) -> Any:
    """Calls `act` in a rank whose S3 clients ask the server of `environment`."""
    import s3fs  # which the fixture may have found missing

    os.environ.update(environment)
    object_store._shared_file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    return act(*arguments)


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.long)])
def test_saves_load_at_other_rank_counts(ranks, server, url, saving, loading):
    saved(url, 2)
    environment = server.environment
    paths = ranks(saving).run(asking, environment, saved_sharded, url, 3, (saving,))
    assert paths == [f"{url}/step-00000003"] * saving
    found = ranks(loading).run(asking, environment, loaded_sharded, url, (loading,))
    for rank, (state, whole) in enumerate(found):
        own = ones_own(3 if rank < saving else 0, rank)
        assert_same(whole, numbers(3) | {f"random.rank{rank}": own})
        assert (state.step, state.noted) == (3, {"tokens": 300})
    assert latest_checkpoint(url) == paths[0]


def test_a_save_in_the_background_is_the_same(url):
    with BackgroundSaver(url) as saver:
        for step in (1, 2):
            saver.save(State(step, numbers(step)))
        saver.wait()
        assert [(one.step, one.path, one.error) for one in saver.outcomes()] == [
            (step, f"{url}/step-0000000{step}", None) for step in (1, 2)
        ]
    assert_same(loaded(url).held, numbers(2))


@dataclass(frozen=True)
class _DiesBeforeCommit(ObjectLocation):
    def commit(self, draft: Any, manifest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def die_before_commit(url: str) -> None:
    saved(_DiesBeforeCommit(url), 2)


def unfinished_uploads(url: str) -> list[str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = ObjectStore(url)._file_system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return [one["Key"] for one in found.get("Uploads", [])]


def test_a_killed_save_leaves_no_checkpoint(ranks, server, url):
    saved(url, 1)
    before = set(objects(url))
    with pytest.raises(RankFailed, match="died"):
        ranks(1).run(asking, server.environment, die_before_commit, url)
    assert set(objects(url)) > before
    place = location_of(url)
    assert [step for step, _ in place.list_checkpoints()] == [1]
    assert len(place.describe_drafts()) == 1
    assert_same(loaded(url).held, numbers(1))
    saved(url, 3)
    assert len(place.describe_drafts()) == 1  # for a day: see the tests of `is_attempt_abandoned`
    assert loaded(url).step == 3


def test_a_flipped_byte_is_detected_and_an_older_checkpoint_loaded(url, caplog):
    saved(url, 1)
    path = saved(url, 2)
    flip(data_file(path), at=3000)
    (damage,) = iterate_damage(path)
    assert len(damage.tensors) == 1
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        state = loaded(url)
    assert state.step == 1
    assert "an older checkpoint is taken instead" in caplog.text
    place = location_of(url)
    assert [step for step, _ in place.list_checkpoints()] == [1]
    kept = objects(path)
    saved(url, 2)
    assert kept.items() <= objects(path).items()  # what was set aside is not removed
    assert loaded(url).step == 2


def test_a_damaged_manifest_costs_no_file(url):
    saved(url, 1)
    path = saved(url, 2)
    before = objects(path)
    flip(f"{path}/{MANIFEST}", at=ObjectStore(url).read_object(f"{path}/{MANIFEST}").index(b'"attempt"') + 12)
    assert loaded(url).step == 1
    saved(url, 3)
    saved(url, 2)  # takes the place of the damaged one
    assert {name for name in before if name != MANIFEST} <= set(objects(path))
    assert loaded(f"{url}/step-00000002").step == 2


@dataclass(frozen=True)
class _Overtaken(ObjectLocation):
    """Another job saves the same step when this one is about to commit."""

    def commit(self, draft: Any, manifest: Any) -> Any:
        saved(self.url, manifest.step)
        return super().commit(draft, manifest)


def test_of_two_writers_of_a_step_one_wins(url):
    with pytest.raises(CheckpointError, match="another job has saved") as raised:
        save(State(5, {name: tensor + 1 for name, tensor in numbers(5).items()}), _Overtaken(url))
    assert "never overwritten" in str(raised.value)
    assert_same(loaded(url).held, numbers(5))
    assert location_of(url).describe_drafts() == []
    assert len(ObjectStore(url).list_prefix(f"{url}/step-00000005").prefixes) == 1


@dataclass(frozen=True)
class _AsksTwice(ObjectLocation):
    """As a backend does whose first answer was lost."""

    def commit(self, draft: Any, manifest: Any) -> Any:
        super().commit(draft, manifest)
        return super().commit(draft, manifest)


def test_a_commit_whose_answer_was_lost_is_a_commit(url):
    saved(_AsksTwice(url), 1)
    assert loaded(url).step == 1


@dataclass(frozen=True)
class _Loses(ObjectLocation):
    """The store takes a file, and does not have it."""

    def commit(self, draft: Any, manifest: Any) -> Any:
        ObjectStore(self.url).remove_objects([f"{draft}/{manifest.data_file_names[0]}"])
        return super().commit(draft, manifest)


def test_a_save_with_lost_objects_is_not_committed(url):
    with pytest.raises(CheckpointError, match="was not stored"):
        saved(_Loses(url), 1)
    assert objects(url) == {}


def fill_and_fail(files: ObjectFiles) -> None:
    with files.create_file("file") as file:
        file.write(bytes(PART_BYTES + 1))
        raise KeyError


def test_an_upload_that_fails_makes_no_object(url):
    files = ObjectFiles(url, "attempt", PART_BYTES)
    with pytest.raises(KeyError):
        fill_and_fail(files)
    assert objects(url) == {}
    assert unfinished_uploads(url) == []


def test_retention_removes_every_object_of_old_checkpoints(url):
    for step in (1, 2, 3, 4):
        saved(url, step, keep=2)
    place = location_of(url)
    assert [step for step, _ in place.list_checkpoints()] == [4, 3]
    assert {name.partition("/")[0] for name in objects(url)} == {"step-00000003", "step-00000004"}


def test_a_copy_from_a_file_system_is_a_checkpoint(url, tmp_path):
    path = saved(tmp_path, 7)
    for file in path.iterdir():
        ObjectStore(url).put_new_object(f"{url}/step-00000007/{file.name}", data=file.read_bytes())
    assert_same(loaded(url).held, numbers(7))
    saved(url, 8, keep=1)
    assert {name.partition("/")[0] for name in objects(url)} == {"step-00000008"}


def test_an_attempt_that_may_still_be_written_is_left_alone(url, caplog):
    place = ObjectLocation(url)
    draft = place.clean_up_and_create_draft(1, needed_bytes=0)
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        saved(url, 2)
    assert "may still be writing" in caplog.text
    assert place.describe_drafts() == [f"{draft}: a save that is still running, or was not finished"]
    place.discard_draft(draft)
    assert place.describe_drafts() == []


def test_an_attempt_that_is_older_than_any_save_is_abandoned(url):
    draft = ObjectLocation(url).clean_up_and_create_draft(1, needed_bytes=0)
    now = ObjectStore(url).list_prefix(str(draft)).objects[WRITER]
    assert not is_attempt_abandoned(draft, now)
    assert now.changed is not None
    assert not is_attempt_abandoned(draft, replace(now, changed=now.changed + timedelta(hours=23)))
    assert is_attempt_abandoned(draft, replace(now, changed=now.changed + timedelta(hours=25)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_a_checkpoint(url):
    path = saved(url, 6)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in numbers(6).items()}
    reader = FsspecReader(f"{path}/{read_manifest(path).attempt}")
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert_same(tensors, numbers(6))


@dataclass(frozen=True)
class _LosesTheStore(ObjectLocation):
    def commit(self, draft: Any, manifest: Any) -> Any:
        os.kill(int(os.environ["SERVER"]), signal.SIGKILL)
        return super().commit(draft, manifest)


def save_without_a_store(url: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        saved_sharded(_LosesTheStore(url), 1, (2,))
    return str(raised.value)


def test_a_store_that_stops_answering_is_an_error_on_all_ranks(ranks, tmp_path):
    with served(tmp_path) as server:
        environment = server.environment | {"SERVER": str(server.process.pid)}
        for message in ranks(2).run(asking, environment, save_without_a_store, server.url("run")):
            assert "saving step 1 to s3://bucket/run" in message
            assert "the store does not answer" in message


@pytest.mark.long  # subprocesses that import everything
def test_missing_credentials_and_a_missing_package_are_reported(server):
    program = """
import os, sys
from fullshard.cli.main import main
sys.modules["s3fs"] = None
assert main(["ckpt", "list", "s3://bucket/run"]) == 2
del sys.modules["s3fs"], os.environ["AWS_ACCESS_KEY_ID"]
assert main(["ckpt", "list", "s3://bucket/run"]) == 6
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | server.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no credentials" in done.stderr
    assert 'pip install "fullshard[s3]"' in done.stderr


def test_no_object_and_no_message_has_the_credentials(url, caplog):
    caplog.set_level("DEBUG", logger="fullshard")
    files = checkpoint_files_at(str(saved(url, 1)))
    loaded(url)
    assert not [name for name in files.file_sizes_bytes() if SECRET.encode() in files.read_file(name)]
    assert SECRET not in "".join(one.getMessage() for one in caplog.records if one.name == "fullshard")


def test_a_missing_bucket_is_refused(server):
    for act in (lambda: saved("s3://nowhere/run", 1), lambda: loaded("s3://nowhere/run")):
        with pytest.raises(CheckpointError, match="no such bucket"):
            act()


def test_the_command_line_takes_urls(url, tmp_path, capsys):
    _, other = saved(url, 1), saved(url, 2)
    assert main(["ckpt", "list", url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "step-00000001",
        "step-00000002",
    ]
    assert main(["ckpt", "verify", url]) == 0
    assert main(["ckpt", "export", url, str(tmp_path / "model.safetensors")]) == 0
    flip(data_file(str(other)), at=2000)
    capsys.readouterr()
    assert main(["ckpt", "verify", url]) == CheckpointError.exit_code
    assert "touches" in capsys.readouterr().out
    assert main(["ckpt", "list", f"{url}/nothing"]) == CheckpointError.exit_code


def test_other_stores_of_fsspec_serve_one_process():
    url = f"memory://place/{time.monotonic_ns()}"
    saved(url, 1)
    assert_same(loaded(url).held, numbers(1))
    with pytest.raises(CheckpointError, match="another job has saved"):
        saved(_Overtaken(url), 2)
    assert read_manifest(f"{url}/step-00000002").step == 2


def test_a_store_that_replaces_objects_is_named(caplog):
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Careless(MemoryFileSystem):
        protocol = "careless"
        store: dict[str, Tensor] = {}  # noqa: RUF012  # as its parent has it
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("careless://"))

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
            super().pipe_file(path, value, **options)

    fsspec.register_implementation("careless", Careless, clobber=True)
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        saved("careless://place/run", 1)
    assert "does not refuse to replace" in caplog.text


def test_a_local_url_is_a_directory(tmp_path: Path):
    assert saved(f"file://{tmp_path}", 1) == tmp_path / "step-00000001"
    assert loaded(tmp_path).step == 1
