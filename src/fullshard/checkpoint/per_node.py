"""Checkpoints on disks that nodes do not share: each disk holds the files of its node's ranks.

[Note: prepared, then committed] Every node writes its files and its manifest into a draft and flushes them.
Only after all nodes have done so does each rename its draft. So if one node has the step, every node has it,
committed or prepared, and the next start renames the remaining drafts. A step that is not on all its nodes
was never acknowledged.

[Note: every copy] DCP writes a replicated shard only once. With a disk per node, a rank could then not read
its own state back. So here each rank writes all of its shards, and prefers its own copies when it reads. The
same nodes load a step in place, each rank from its own disk. Other nodes load a directory into which the
step's files of all nodes were copied.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.checkpoint.files import LocalFiles, RanksSharingDisk
from fullshard.checkpoint.location import LocalLocation, list_directories
from fullshard.checkpoint.manifest import MANIFEST, read_manifest_and_check_sizes, step_name
from fullshard.distributed.agreement import (
    Group,
    all_gather_object,
    raise_on_all_ranks,
    rank,
    run_on_rank_zero,
)
from fullshard.errors import CheckpointError
from fullshard.system.files import fsync_path, make_durable_directory

logger = logging.getLogger("fullshard")


@dataclass(frozen=True)
class NodeLocalDirectory(LocalLocation):
    """A directory with the same path on every node, each on the node's own disk."""

    def __str__(self) -> str:
        return f"{self.path} of each node"

    def recover_and_group_ranks(self, *, group: Group = None) -> RanksSharingDisk:
        """Finds the ranks that share a disk: each writes a file, and sees those of ranks on the same disk.

        The lowest rank of a disk leads. Then commits, on every disk, the drafts of steps that all nodes
        prepared. See [Note: prepared, then committed].
        """
        token = run_on_rank_zero(lambda: secrets.token_hex(4), doing="choosing a token", group=group)
        doing, sign = f"looking who shares {self.path}", self.path / f".seat-{token}-{rank()}"
        with raise_on_all_ranks(doing, group=group):
            make_durable_directory(self.path)
            sign.touch()
        with raise_on_all_ranks(doing, group=group):
            leader = min(int(one.name.rpartition("-")[2]) for one in self.path.glob(f".seat-{token}-*"))
        leaders = sorted(set(all_gather_object(leader, group=group)))
        sign.unlink()
        with raise_on_all_ranks(f"looking for checkpoints in {self.path}", group=group):
            mine = list_node_checkpoints(self) if leader == rank() else []
        known = steps_on_all_disks([one for many in all_gather_object(mine, group=group) for one in many])
        with raise_on_all_ranks(f"committing what was prepared in {self.path}", group=group):
            for one in mine:
                target = self.path / step_name(one.step)
                if (one.step, one.attempt) in known and one.name != target.name:
                    (self.path / one.name).rename(target)
                    fsync_path(self.path)
                    logger.warning("%s was prepared on every node, and is committed now", target)
        node, steps = leaders.index(leader), tuple(step for step, _ in known)
        return RanksSharingDisk(leader, node, len(leaders), attempt=token, complete_steps=steps)


@dataclass(frozen=True)
class NodeCheckpoint:
    """One disk's part of a step, committed or prepared in a draft, as its manifest describes it."""

    step: int
    attempt: str
    node: int
    nodes: int
    name: str  # of its directory
    skipped_in_a_row: int = 0


def list_node_checkpoints(own: LocalLocation) -> list[NodeCheckpoint]:
    """Returns the checkpoints and prepared drafts on this disk that have a manifest and complete files."""
    found: list[NodeCheckpoint] = []
    path = own.path
    for directory in list_directories(path, "step-*") + list_directories(path, ".tmp-*"):
        if not (directory / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest_and_check_sizes(LocalFiles(directory))
        except CheckpointError as error:
            logger.warning("passing over %s: %s", directory, error.got or error.what)
            continue
        if manifest.attempt is not None:
            own_facts = manifest.step, manifest.attempt, manifest.node, manifest.nodes
            found.append(NodeCheckpoint(*own_facts, directory.name, manifest.skipped_in_a_row))
    return found


def steps_on_all_disks(held: Sequence[NodeCheckpoint]) -> list[tuple[int, str]]:
    """Returns (step, attempt) of each step that is in `held` for every one of its disks.

    They are in the order of `location.iterate_complete_checkpoints`.
    """
    where: dict[tuple[bool, int, str, int], set[int]] = {}
    for one in held:
        where.setdefault((not one.skipped_in_a_row, one.step, one.attempt, one.nodes), set()).add(one.node)
    found = [key for key, on in where.items() if on == set(range(key[-1]))]
    return [(step, attempt) for _, step, attempt, _ in sorted(found, reverse=True)]
