"""Checkpoints on disks that nodes do not share: each disk holds what its node's ranks write, and all commit
together.

[Note: prepared, then committed] Every node writes its files and its manifest into a draft and flushes them.
Only when all nodes have done so does any of them rename its draft. So if one node has the step, every node
has it, committed or prepared, and the next start renames the remaining drafts. A step that is not on all its
nodes was never acknowledged.

[Note: every copy] DCP writes a replicated shard only once. With a disk per node, a rank could then not read
its own state back. So here each rank writes all of its shards, and reads its own copies first. The same nodes
load a step in place, each rank from its own disk. For other nodes it is gathered first (`gather`).
"""

import logging
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint import leftovers
from fullshard.checkpoint.digests import KeyFile
from fullshard.checkpoint.files import LocalFiles, write_file
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.manifest import (
    MANIFEST,
    SHARDS,
    Manifest,
    SavedFile,
    describe_small,
    step_name,
    verify,
)
from fullshard.checkpoint.read_back import require_manifest, require_written
from fullshard.checkpoint.verify import find_damage
from fullshard.distributed.agreement import Group, gathered, locally, on_all_ranks, on_rank_zero, rank
from fullshard.errors import CheckpointError
from fullshard.system import disk

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class NodeLocalDirectory:
    """A directory with the same path on every node, each on the node's own disk."""

    path: Path
    key: KeyFile | None = None

    def __str__(self) -> str:
        return f"{self.path} of each node"

    @property
    def own(self) -> LocalLocation:
        """Location on this node's disk."""
        return LocalLocation(self.path, key=self.key)


@dataclass(frozen=True)
class NodeRank:
    """Disk that a rank writes to.

    node: index of the disk
    nodes: number of disks
    is_leader: whether this rank does the work that is done once per disk
    """

    node: int
    nodes: int
    is_leader: bool


def find_seat(path: Path, *, group: Group = None) -> NodeRank:
    """Finds out which ranks share a disk, by the files that each sees of the others. Collective.

    The lowest rank on each disk is its leader.
    """
    token = on_rank_zero(lambda: secrets.token_hex(4), doing="choosing a token", group=group)

    def show() -> None:
        disk.make_directory(path)
        (path / f".seat-{token}-{rank()}").touch()

    doing = f"looking who shares {path}"
    on_all_ranks(show, doing=doing, group=group)
    lowest = on_all_ranks(
        lambda: min(int(one.name.rpartition("-")[2]) for one in path.glob(f".seat-{token}-*")),
        doing=doing,
        group=group,
    )
    leaders = sorted(set(gathered(lowest, group=group)))
    (path / f".seat-{token}-{rank()}").unlink()
    return NodeRank(leaders.index(lowest), len(leaders), is_leader=lowest == rank())


@dataclass(frozen=True)
class NodeCheckpoint:
    """A step on one disk: committed, or prepared in a draft.

    step: finished steps
    attempt: the save that the files belong to
    node: index of the disk
    nodes: number of disks that hold the step
    name: name of its directory
    """

    step: int
    attempt: str
    node: int
    nodes: int
    name: str


def held_steps(own: LocalLocation) -> list[NodeCheckpoint]:
    """Returns the steps, committed or not, that have a manifest on this disk and complete files."""
    found: list[NodeCheckpoint] = []
    path = own.path
    for directory in leftovers.directories(path, "step-*") + leftovers.directories(path, ".tmp-*"):
        if not (directory / MANIFEST).exists():
            continue
        try:
            manifest = verify(LocalFiles(directory, own.key))
        except CheckpointError as error:
            logger.warning("passing over %s: %s", directory, error.got or error.what)
            continue
        if manifest.attempt is not None:
            found.append(
                NodeCheckpoint(manifest.step, manifest.attempt, manifest.node, manifest.nodes, directory.name)
            )
    return found


def complete(held: Sequence[NodeCheckpoint]) -> list[tuple[int, str]]:
    """Returns (step, attempt) of each step that is on all its disks, highest step first."""
    where: dict[tuple[int, str, int], set[int]] = {}
    for one in held:
        where.setdefault((one.step, one.attempt, one.nodes), set()).add(one.node)
    return sorted(((s, a) for (s, a, nodes), on in where.items() if on == set(range(nodes))), reverse=True)


def finish_commits(
    disks: NodeLocalDirectory, seat: NodeRank, *, group: Group = None
) -> list[tuple[int, str]]:
    """Commits on every disk the steps that all nodes prepared; returns the complete ones. Collective.

    See [Note: prepared, then committed].
    """
    path = disks.path
    mine = on_all_ranks(
        lambda: held_steps(disks.own) if seat.is_leader else [],
        doing=f"looking for checkpoints in {path}",
        group=group,
    )
    known = complete([one for many in gathered(mine, group=group) for one in many])

    def commit() -> None:
        for one in mine:
            if (one.step, one.attempt) in known and one.name != step_name(one.step):
                (path / one.name).rename(path / step_name(one.step))
                disk.flush(path)
                logger.warning(
                    "%s was prepared on every node, and is committed now", path / step_name(one.step)
                )

    on_all_ranks(commit, doing=f"committing what was prepared in {path}", group=group)
    return known


def begin(
    disks: NodeLocalDirectory,
    seat: NodeRank,
    *,
    step: int,
    needed_bytes: int,
    held: ExitStack,
    group: Group = None,
) -> LocalFiles:
    """Returns an empty draft on this rank's disk. Collective.

    Until `held` closes, no other process may write there.
    """
    place = disks.own

    def lead() -> str | None:
        if not seat.is_leader:
            return None
        held.enter_context(place.writing())
        target = disks.path / step_name(step)
        if target.exists():
            aside = place.set_aside(LocalFiles(target))
            logger.warning("%s is not on every node; renamed to %s", target, aside)
        return place.begin(step, needed_bytes=needed_bytes).name

    name = on_all_ranks(lead, doing=f"saving step {step} to {disks}", group=group)
    drafts = {node: draft for node, draft in gathered((seat.node, name), group=group) if draft is not None}
    return LocalFiles(disks.path / drafts[seat.node], disks.key)


def commit(
    draft: LocalFiles,
    seat: NodeRank,
    *,
    manifest: Manifest,
    index: bytes | None,
    read_back: bool = False,
    group: Group = None,
) -> Path:
    """Prepares the step on every disk, then commits it. Collective.

    index: index of the shards, which every disk gets
    read_back: whether manifest and index are verified on the disk before any disk commits
    """
    doing = f"committing {draft}"
    target = draft.path.with_name(step_name(manifest.step))

    def prepare() -> None:
        if seat.is_leader:
            if index is not None and SHARDS not in draft.sizes():
                write_file(draft, SHARDS, data=index)
            own = manifest.model_copy(update={"node": seat.node})
            write_file(draft, MANIFEST, data=own.encoded(draft.key))
            if read_back:
                every = {name: one for name, one in own.files.items() if one.node is None}
                require_written(draft, own.model_copy(update={"files": every}))
                require_manifest(draft)

    def rename() -> None:
        if seat.is_leader:
            draft.path.rename(target)
            disk.flush(target.parent)

    on_all_ranks(prepare, doing=doing, group=group)
    on_all_ranks(rename, doing=doing, group=group)
    return target


def discard(draft: LocalFiles, seat: NodeRank) -> None:
    """Removes the draft from every disk. Every rank calls it; no rank waits for another."""
    if seat.is_leader:
        leftovers.remove(draft.path)


def gather(sources: Sequence[Path], target: Path, *, key_file: Path | None = None) -> Path:
    """Copies the newest step that is on all its nodes into `target`, as a checkpoint on one disk.

    sources: the nodes' directories of checkpoints, in any order
    key_file: see `location_of`

    Every byte is verified first. Returns the path of the copy. Raises CheckpointError if no step is complete,
    or if a byte is damaged.
    """
    key = None if key_file is None else KeyFile(key_file)
    disks = [LocalLocation(source, key=key) for source in sources]
    return locally(lambda: _gather(disks, LocalLocation(target, key=key)), doing=f"gathering into {target}")


def _gather(disks: Sequence[LocalLocation], target: LocalLocation) -> Path:
    held = [(one, step) for one in disks for step in held_steps(one)]
    known = complete([step for _, step in held])
    if not known:
        found = ", ".join(f"step {step.step} of node {step.node} in {one}" for one, step in held)
        raise CheckpointError(
            "no step is there of all its nodes.", got=found or "nothing", fix="the directories of all nodes"
        )
    parts = {
        step.node: LocalFiles(one.path / step.name, one.key)
        for one, step in held
        if (step.step, step.attempt) == known[0]
    }
    manifests = {node: verify(files) for node, files in parts.items()}
    for files in parts.values():
        for damage in find_damage(files):
            raise CheckpointError(f"{files} is damaged.", got=f"{damage.file}: {damage.what}")
    manifest = manifests[0]
    with target.writing():
        draft = target.begin(manifest.step, needed_bytes=manifest.size_bytes)
        copied: dict[str, SavedFile] = {}
        for name, file in manifest.files.items():
            if name != leftovers.WRITER:
                with parts[file.node or 0].open(name) as source, draft.create(name) as copy:
                    shutil.copyfileobj(source, copy, length=16 << 20)
                copied[name] = file.model_copy(update={"node": None})
        copied[leftovers.WRITER] = describe_small(draft, draft.read(leftovers.WRITER))
        whole = manifest.model_copy(update={"files": copied, "nodes": 1, "node": 0, "attempt": None})
        return Path(str(target.commit(draft, whole)))
