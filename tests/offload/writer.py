"""State whose every byte follows from its step, and a process that keeps one generation after the other."""

import hashlib
import itertools
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fullshard.errors import OffloadError
from fullshard.offload.directories import DataFileRegion, RunRankIdentity
from fullshard.offload.drive import SYSTEM, DriveSystemCalls
from fullshard.offload.generations import Generation, GenerationFiles
from tests.offload.systems import without_direct

IDENTITY = RunRankIdentity(run_id="run", rank=3, world_size=4, layout="ab" * 16)
RECORDS = (
    DataFileRegion(name="group 0", offset_bytes=0, length_bytes=102_400),
    DataFileRegion(name="group 1", offset_bytes=102_400, length_bytes=65_536),
    DataFileRegion(name="group 2", offset_bytes=167_936, length_bytes=4096),
)
PAYLOAD_BYTES = 64 << 10


def opened(
    directory: Path,
    *,
    records: Sequence[DataFileRegion] = RECORDS,
    identity: RunRankIdentity = IDENTITY,
    system: DriveSystemCalls = SYSTEM,
) -> GenerationFiles:
    return GenerationFiles(directory, records, identity=identity, payload_bytes=PAYLOAD_BYTES, system=system)


def content(step: int, name: str, *, length: int) -> bytes:
    return hashlib.shake_128(f"{step} {name}".encode()).digest(length)


def page(data: bytes) -> memoryview:
    """A copy of `data` that begins at a page, and may be changed."""
    copied = memoryview(mmap.mmap(-1, len(data)))
    copied[:] = data
    return copied


def payload(step: int) -> bytes:
    return content(step, "payload", length=500 + step % 7 * 1000)


def put(generations: GenerationFiles, step: int) -> Generation:
    generations.start_next_generation()
    for record in generations.records.values():
        data = content(step, record.name, length=record.length_bytes)
        generations.write_record(record.name, page(data))
    return generations.commit_generation(step, payload(step))


def holds(generations: GenerationFiles, generation: Generation) -> bool:
    """Returns whether all bytes are those of its step. Raises DamagedOffloadError for a wrong digest."""
    for record in generations.records.values():
        target = page(bytes(record.length_bytes))
        generations.read_record(record.name, target, slot=generation.slot, verify=True)
        if target != content(generation.step, record.name, length=record.length_bytes):
            return False
    return generations.read_generation_payload(generation) == payload(generation.step)


def usable(directory: Path) -> list[int]:
    """The steps of the whole generations that pass `verify`, newest first; all hold what they say."""
    found: list[int] = []
    with opened(directory) as generations:
        for generation in generations.list_complete_generations():
            try:
                is_intact = holds(generations, generation)
            except OffloadError:
                continue
            assert is_intact, f"{generation} holds other bytes, which its digests do not show"
            found.append(generation.step)
    return found


def keep_on(directory: Path, acknowledged: Path, *, system: DriveSystemCalls = SYSTEM) -> None:
    """Continues after the newest whole generation until it is killed; notes each step that is committed."""
    with opened(directory, system=system) as generations, acknowledged.open("ab", buffering=0) as notes:
        newest = generations.list_complete_generations()
        for step in itertools.count(newest[0].step + 1 if newest else 1):
            put(generations, step)
            notes.write(f"{step}\n".encode())


def keep_on_cached(directory: Path, acknowledged: Path) -> None:
    """`keep_on` without direct I/O."""
    keep_on(directory, acknowledged, system=without_direct())


def hold(directory: Path, ready: Path) -> None:
    """Has the directory open until it is killed."""
    with opened(directory):
        ready.write_text(str(os.getpid()))
        time.sleep(200)


def leave_a_child(directory: Path, ready: Path) -> None:
    """Ends with the directory open, as if it were killed; its child lives on for a while."""
    generations = opened(directory)
    if os.fork():
        ready.write_text(str(os.getpid()))
        os._exit(0)
    time.sleep(0.5)
    generations.close()


def let_go_beside_a_child(directory: Path, ready: Path) -> None:
    """Closes the directory, which its child has not; waits until it is killed, and its child with it."""
    generations, parent = opened(directory), os.getpid()
    if os.fork():
        generations.close()
        ready.write_text(str(parent))
        time.sleep(200)
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    verbs = [keep_on, keep_on_cached, hold, leave_a_child, let_go_beside_a_child]
    {verb.__name__: verb for verb in verbs}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
