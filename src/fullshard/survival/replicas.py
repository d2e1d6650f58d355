"""Check that ranks with the same part of the state (replicas) hold the same bits.

Replicas start equal and take the same updates, so they stay equal bit for bit. If they differ, one of them
computed, stored or received something wrong (arXiv:2407.21783, section 3.3.4, counts such faults).
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        own = _checksums_by_holders(model, tensors())
        # Two groups of replicas never have the same two first ranks and the same length.
        digests = all_gather_object(
            {(*ranks[:2], len(ranks)): _digest(found.values()) for ranks, found in own.items()}
        )
        counts = Counter(key for key, _ in {item for one in digests for item in one.items()})
        differing = {key for key, count in counts.items() if count > 1}
        if differing:
            named = {ranks: found for ranks, found in own.items() if (*ranks[:2], len(ranks)) in differing}
            raise _replica_mismatch_error(step, all_gather_object(named))


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


def _checksums_by_holders(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[tuple[int, ...], dict[str, int]]:
    """Returns the checksums of replicated tensors by the ranks that hold the same part, and by name."""
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    device = next(model.parameters()).device
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in parameters and not name.startswith("optimizer."):
            continue  # buffers and random states are each rank's own
        for group in _replicating_process_groups(tensor):
            ranks = tuple(dist.get_process_group_ranks(group))
            found.setdefault(ranks, {})[name] = tensor_checksum(tensor).to(device)
    return {
        ranks: dict(zip(sums, cast(list[int], torch.stack([*sums.values()]).tolist()), strict=True))
        for ranks, sums in found.items()
    }


def _digest(checksums: Iterable[int]) -> str:
    return hashlib.blake2b(repr([*checksums]).encode(), digest_size=16).hexdigest()


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


def _replica_mismatch_error(
    step: int, found: Sequence[Mapping[tuple[int, ...], Mapping[str, int]]]
) -> TrainError:
    """Returns the error that names, for each group of replicas, the tensor and the ranks that differ.

    found: the checksums of each rank in the groups that differ
    """
    lines: list[str] = []
    for holders in sorted({holders for one in found for holders in one}):
        sums = {rank: found[rank][holders] for rank in holders}
        name = next(name for name in sums[holders[0]] if len({one[name] for one in sums.values()}) > 1)
        (usual, votes), *others = Counter(one[name] for one in sums.values()).most_common()
        odd = [rank for rank in holders if sums[rank][name] != usual]
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
