"""Check that ranks with the same part of the state (replicas) hold the same bits.

Replicas start equal and take the same updates, so they stay equal bit for bit. If they differ, one of them
computed, stored or received something wrong (arXiv:2407.21783, section 3.3.4, counts such faults).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.survival.fingerprint import rank_list_text
from fullshard.survival.phase import PhaseTracker, RunPhase

logger = logging.getLogger("fullshard")

# Elements summed at once; each takes 24 bytes of temporary memory.
_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass
class _ReplicaGroup:
    """A group of ranks, and the names and checksums of the tensors that these ranks replicate."""

    ranks: tuple[int, ...]
    group: Any
    names: list[str] = field(default_factory=list[str])
    checksums: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(frozen=True)
class _MismatchedChecksum:
    """The checksum on `rank` of `name`, the first tensor that differs among the ranks `holders`."""

    holders: tuple[int, ...]
    rank: int
    name: str
    checksum: int


class ReplicaCheck:
    """Compares replicas every `fault_tolerance.check_replicas_every` steps. Warns if no shard has one."""

    def __init__(self, plan: Plan) -> None:
        self._world_size, self._every = plan.world_size, plan.run.fault_tolerance.check_replicas_every
        if self._every and plan.replicate_degree == 1 and plan.world_size > 1 and dist.get_rank() == 0:
            logger.warning(
                "fault_tolerance.check_replicas_every: %s holds every shard on one rank alone; "
                "only unsharded tensors can be compared",
                plan.strategy,
            )

    def compare_if_due(
        self, model: nn.Module, tensors: Callable[[], Mapping[str, Tensor]], *, step: int, where: PhaseTracker
    ) -> None:
        """Compares parameters and optimizer state over the ranks that replicate them, if due. Collective.

        tensors: returns the tensors of the training state, by their names in checkpoints
        step: number of finished steps

        If they differ, raises TrainError on all ranks, which names the first such tensor and the ranks.
        """
        if self._world_size == 1 or not self._every or step % self._every:
            return
        where.enter(RunPhase.REDUCE)
        groups = _group_replicated_tensors(model, tensors())
        device = next(model.parameters()).device
        found = [one for group in groups for one in _find_first_mismatch(group)]
        count = torch.tensor([len(found)], device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if count.item():
            raise _replica_mismatch_error(step, [one for each in all_gather_object(found) for one in each])


@torch.no_grad()
def tensor_checksum(tensor: Tensor) -> Tensor:
    """Returns Σ (2i + 1) · word_i mod 2^64 over the words of this rank's part, as an int64 scalar tensor.

    The factors are odd, so a change of one word always changes the sum. They differ, so swapping two
    different words changes it too.
    """
    local = local_tensor(tensor.detach()).contiguous().reshape(-1)
    words = local.view(_WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        weights = torch.arange(2 * start + 1, 2 * (start + chunk.numel()) + 1, 2, device=local.device)
        total += (chunk * weights).sum()
    return total


def _group_replicated_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[_ReplicaGroup]:
    """Groups the replicated tensors by the ranks that hold the same part, in one order on all ranks."""
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    device = next(model.parameters()).device
    groups: dict[tuple[int, ...], _ReplicaGroup] = {}
    for name, tensor in tensors.items():
        if name not in parameters and not name.startswith("optimizer."):
            continue  # buffers and random states are each rank's own
        for group in _replicating_process_groups(tensor):
            ranks = tuple(dist.get_process_group_ranks(group))
            holders = groups.setdefault(ranks, _ReplicaGroup(ranks, group))
            holders.names.append(name)
            holders.checksums.append(tensor_checksum(tensor).to(device))
    return list(groups.values())


def _replicating_process_groups(tensor: Tensor) -> list[Any]:
    """Returns the process groups whose ranks hold the same part of `tensor` as this rank, one per axis."""
    if not isinstance(tensor, DTensor):
        return [dist.group.WORLD]
    mesh = tensor.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    replicated = [axis for axis in axes if tensor.placements[axis].is_replicate()]
    if replicated and replicated == axes and mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return [mesh.get_group(axis) for axis in replicated]


def _find_first_mismatch(holders: _ReplicaGroup) -> list[_MismatchedChecksum]:
    """Compares checksums within one group. Returns at most one mismatch, of the first differing tensor."""
    own = torch.stack(holders.checksums)
    bounds = torch.cat([own, ~own])  # the least of ~x is ~ the greatest of x
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=holders.group)
    least, greatest = bounds[: len(own)], ~bounds[len(own) :]
    differing = cast(list[int], (least != greatest).nonzero().flatten().tolist())
    return [
        _MismatchedChecksum(holders.ranks, dist.get_rank(), holders.names[index], int(own[index].item()))
        for index in differing[:1]
    ]


def _replica_mismatch_error(step: int, found: Sequence[_MismatchedChecksum]) -> TrainError:
    """Returns the error that names, for each group of replicas, the tensor and the ranks that differ."""
    lines: list[str] = []
    for holders in sorted({one.holders for one in found}):
        ours = [one for one in found if one.holders == holders]
        (usual, votes), *others = Counter(one.checksum for one in ours).most_common()
        odd, name = [one.rank for one in ours if one.checksum != usual], ours[0].name
        if others[0][1] == votes:  # a tie
            lines.append(f"{rank_list_text(holders)} differ in {name}, none more than another")
        else:
            rest = [rank for rank in holders if rank not in odd]
            lines.append(f"{rank_list_text(odd)} differs from {rank_list_text(rest)}, first in {name}")
    return TrainError(
        f"replicas are not the same after step {step}: {lines[0]}.",
        got="; ".join(lines),
        why="replicas take the same updates, so a device, its memory or a link has given wrong numbers, or "
        "code of the run changes parameters on some ranks only",
        fix="resume from a checkpoint before it, without the machine of that rank",
    )
