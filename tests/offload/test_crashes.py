"""After kills, power cuts, damage and failing drives the newest whole generation is loaded, or an error."""

import errno
import logging
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from fullshard.errors import DamagedOffloadError, OffloadError
from fullshard.offload.directories import DataFileRegion, rank_directory
from tests.faults.disks import powerless_disk
from tests.offload.processes import running
from tests.offload.systems import Cut, PowerCut, Watched, failing
from tests.offload.writer import IDENTITY, holds, opened, payload, put, usable


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return rank_directory(tmp_path / "nvme", run_id="run", rank=3)


# Crashes


def test_a_crash_at_any_call_leaves_the_newest_committed_generation(tmp_path: Path) -> None:
    """At each of the calls that four steps make, the last of which may be done in part."""
    for after in range(1, 1000):
        directory, committed = tmp_path / f"{after}" / "rank-00003", 0
        try:
            with opened(directory, system=Cut(after).system()) as generations:
                for step in (1, 2, 3, 4):
                    committed = put(generations, step).step
        except PowerCut:
            steps = usable(directory)
            assert steps[:1] in ([committed] if committed else [], [committed + 1]), f"call {after}"
            with opened(directory) as generations:  # the next run continues
                put(generations, 10)
            assert usable(directory)[0] == 10
            shutil.rmtree(directory.parent)
        else:
            break
    assert after > 40, "calls were made"


def test_a_manifest_is_written_after_all_its_files_are_flushed(directory: Path) -> None:
    watched = Watched()
    with opened(directory, system=watched.system()) as generations:
        put(generations, 1)
        put(generations, 2)
    at_manifests = [dirty for name, dirty in watched.unflushed if "json" in name]
    assert at_manifests == [frozenset()] * 3  # identity.json is the first
    assert watched.dirty == set()
    assert watched.calls[-2:] == ["fdatasync", "fsync"]  # the manifest, and that it has its name


@pytest.mark.parametrize("verb", ["keep_on", "keep_on_cached"])
def test_a_power_cut_leaves_every_acknowledged_generation(tmp_path: Path, verb: str) -> None:
    rng, notes = random.Random(1), tmp_path / "acknowledged"
    notes.touch()
    with powerless_disk(tmp_path) as disk:
        directory = disk.mounted_at / "run" / "rank-00003"
        for _ in range(4):
            before = notes.read_bytes().count(b"\n")
            with running(verb, directory, notes) as process:
                while notes.read_bytes().count(b"\n") < before + 2:
                    assert process.poll() is None, "it ended"
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.05))
                disk.cut()
            disk.restart()
            acknowledged = max(int(line) for line in notes.read_text().split())
            assert usable(directory)[:1] in ([acknowledged], [acknowledged + 1])


# Damage


def test_a_flipped_bit_invalidates_its_generation(directory: Path) -> None:
    rng = random.Random(0)
    with opened(directory) as generations:
        put(generations, 1)
        newest = put(generations, 2)
    seen = {"data": 0, "payload": 0, "json": 0}
    for kind in [*seen] * 16:
        path = directory / f"state-{newest.slot}.{kind}"
        whole = path.read_bytes()
        used = {"data": rng.choice([102_400, 102_400 + 65_536]), "payload": len(payload(2))}
        at = rng.randrange(used.get(kind, len(whole)))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << rng.randrange(8)]))
        assert usable(directory) == [1], f"byte {at} of {path}"
        seen[kind] += 1
        path.write_bytes(whole)
        assert usable(directory) == [2, 1]
    assert min(seen.values()) == 16


def test_damage_at_any_place_of_a_large_record_is_detected(directory: Path) -> None:
    """It is read and digested piece by piece."""
    length = (40 << 20) + 4096
    large = [DataFileRegion(name="large", offset_bytes=4096, length_bytes=length)]
    with opened(directory, records=large) as generations:
        newest = put(generations, 1)
        assert holds(generations, newest)
        for at in (0, 5, (16 << 20) - 1, 16 << 20, (33 << 20) + 7, length - 1):
            with (directory / "state-0.data").open("r+b") as file:
                file.seek(4096 + at)
                before = file.read(1)
                for byte in (bytes([before[0] ^ 4]), before):
                    file.seek(4096 + at)
                    file.write(byte)
                    file.flush()
                    if byte != before:
                        named = r"(?s)state-0\.data holds other bytes.*large, bytes 4096 to"
                        with pytest.raises(DamagedOffloadError, match=named):
                            holds(generations, newest)
        assert holds(generations, newest)


@pytest.mark.parametrize("kind", ["data", "payload", "json"])
@pytest.mark.parametrize("left", [None, 0, 10])
def test_a_missing_or_truncated_file_is_reported_and_the_older_generation_used(
    directory: Path, caplog: pytest.LogCaptureFixture, kind: str, left: int | None
) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        newest = put(generations, 2)
    path = directory / f"state-{newest.slot}.{kind}"
    path.unlink() if left is None else os.truncate(path, left)
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        assert usable(directory) == [1]
    messages = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert (kind, left) == ("json", None) or str(path) in " ".join(messages)  # no manifest: never committed
    with opened(directory) as generations:
        assert put(generations, 2).slot == newest.slot
    assert usable(directory) == [2, 1]


def test_a_manifest_of_another_rank_is_not_used(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "rank-00003"
    with (
        opened(directory) as generations,
        opened(other, identity=IDENTITY.model_copy(update={"rank": 2})) as two,
    ):
        put(generations, 1)
        put(two, 1)
    shutil.copyfile(other / "state-0.json", directory / "state-0.json")
    assert usable(directory) == []


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "fsync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_drive_that_fails_costs_the_new_generation_only(directory: Path, call: str, number: int) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        put(generations, 2)
    with opened(directory, system=failing(call, number)) as generations:
        with pytest.raises(OffloadError, match=errno.errorcode[number]) as caught:
            put(generations, 3)
        assert str(directory) in str(caught.value)
        assert [generation.step for generation in generations.list_complete_generations()] == [2]
    assert usable(directory) == [2]


def test_a_generation_is_not_overwritten_before_its_removal_is_flushed(directory: Path) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        put(generations, 2)
    before = (directory / "state-0.data").read_bytes()
    with opened(directory, system=failing("fsync", errno.EIO)) as generations:
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"(?s)state-0\.json cannot be removed.*EIO"):
                put(generations, 3)
    assert (directory / "state-0.data").read_bytes() == before
    assert usable(directory)[0] == 2
