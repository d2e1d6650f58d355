"""Collectives that replace gloo's on CPU meshes.

gloo's make copies that NCCL's do not. Without these, a step on CPU ranks would need more memory than one on
GPUs, which the planner counts. Each opens a profiler range, `fullshard::<collective>`, by which
`fullshard.report.profiled_step` finds it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.ranges import TimedRange
from fullshard.torch_private.groups import group_of_name

_FUNCTIONAL = torch.ops._c10d_functional
REDUCTION, ROUND = 1, 2  # tags of messages: a prefetched all-gather may run between the same ranks


class EmptyBuffers:
    """The part of FSDP2's protocol of collectives that allocates buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class DirectReduceScatter(EmptyBuffers):
    """Reduce-scatter for gloo: each rank sends every other its chunk, and adds up the chunks it receives.

    gloo's own reduce-scatter all-reduces a copy of its input. This needs no extra memory: the first chunk
    arrives in the output, and each later one in the place of a chunk already sent. The sum, in the reduce
    dtype, starts with the rank's own chunk and continues with those of the preceding ranks.
    """

    def __call__(  # FSDP2's signature; the input is overwritten
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        chunks = input_tensor.view(ranks, output_tensor.numel())
        arriving = output_tensor
        with TimedRange("reduce_scatter"):
            if ranks == 1:
                output_tensor.copy_(chunks[own])
            for step in range(1, ranks):
                target, source = (own + step) % ranks, (own - step) % ranks
                works = [
                    dist.irecv(arriving, group=group, group_src=source, tag=REDUCTION),
                    dist.isend(chunks[target], group=group, group_dst=target, tag=REDUCTION),
                ]
                _wait_for_works(works)
                output_tensor.add_(chunks[own] if step == 1 else arriving)
                arriving = chunks[target]
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(ranks)


class DirectAllGather(EmptyBuffers):
    """All-gather for gloo: each rank sends its chunk to every other rank, which receives it in its output.

    gloo's own all-gather uses a second buffer as large as the result, and its thread frees both late. The
    peak memory of this one follows from the shapes alone.
    """

    def __call__(  # FSDP2's signature; the input already lies in its place in the output
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        ranks, own, length = dist.get_world_size(group), dist.get_rank(group), input_tensor.numel()
        works: list[dist.Work | None] = []
        with TimedRange("all_gather"):
            for step in range(1, ranks):
                target, source = (own + step) % ranks, (own - step) % ranks
                chunk = output_tensor.narrow(0, source * length, length)
                works.append(dist.irecv(chunk, group=group, group_src=source))
                works.append(dist.isend(input_tensor, group=group, group_dst=target))
            # FSDP2 accepts at most one Work to wait for: all except the last are waited for here.
            last = works.pop() if async_op and works else None
            _wait_for_works(works)
        return last


def all_to_all_parts_pairwise(
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    *,
    group: dist.ProcessGroup,
    tag: int = 0,
    kind: str = "all_to_all",
) -> None:
    """Exchanges parts of any sizes between all ranks over gloo, whose own frees both tensors late.

    Empty parts are not sent.

    sent: the part for each rank, contiguous
    received: where the part of each rank arrives; as large as that rank's part for this one
    tag, kind: of the messages, and of the range in profiles
    """
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    received[own].copy_(sent[own])
    works: list[dist.Work | None] = []
    with TimedRange(kind):
        for step in range(1, ranks):
            target, source = (own + step) % ranks, (own - step) % ranks
            if received[source].numel():
                works.append(dist.irecv(received[source], group=group, group_src=source, tag=tag))
            if sent[target].numel():
                works.append(dist.isend(sent[target], group=group, group_dst=target, tag=tag))
        _wait_for_works(works)


def gather_parts(part: Tensor, group: str, *, direct: bool) -> Tensor:
    """Returns (ranks, ...), the `part` of each rank of the group named `group`. Collective.

    direct: here and below, by this module's collectives, for gloo; else by those of the group's backend
    """
    members = group_of_name(group)
    if not direct:
        stacked = part.unsqueeze(0).contiguous()
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_gather_into_tensor(stacked, members.size(), group))
    gathered = part.new_empty((members.size(), *part.shape))
    own = gathered[members.rank()]
    own.copy_(part)
    DirectAllGather()(gathered.view(-1), own.view(-1), members)
    return gathered


def reduce_parts(parts: Tensor, group: str, *, direct: bool) -> Tensor:
    """Returns the sum over ranks of this rank's part of `parts`, (ranks, ...), overwritten. Collective."""
    if not direct:
        reduced = _FUNCTIONAL.reduce_scatter_tensor(parts.contiguous(), "sum", len(parts), group)
        return _FUNCTIONAL.wait_tensor(reduced).squeeze(0)
    own = parts.new_empty(parts.shape[1:])
    DirectReduceScatter()(own.view(-1), parts.view(-1), group_of_name(group), dist.ReduceOp.SUM)
    return own


def exchange_row_parts(
    rows: Tensor, sent: list[int], *, received: list[int], group: str, direct: bool
) -> Tensor:
    """Exchanges rows (rows, ...), of which each rank gets its number in `sent`. Returns those `received`."""
    if not direct:
        exchanged = _FUNCTIONAL.all_to_all_single(rows.contiguous(), received, sent, group)
        return _FUNCTIONAL.wait_tensor(exchanged)
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    all_to_all_parts_pairwise(rows.split(sent), result.split(received), group=group_of_name(group))
    return result


def all_reduce_together(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums `parts`, all of one dtype, over the ranks of `group` in one all-reduce, in place. Collective."""
    flat = torch.cat([part.flatten() for part in parts])
    with TimedRange("all_reduce"):
        dist.all_reduce(flat, group=group)
    for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def _wait_for_works(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def replace_gloo_collectives(unit: FSDPModule) -> None:
    """Sets DirectAllGather and DirectReduceScatter as the collectives of `unit`, which is on a CPU mesh."""
    unit.set_custom_all_gather(cast(Any, DirectAllGather()))
    unit.set_custom_reduce_scatter(cast(Any, DirectReduceScatter()))
