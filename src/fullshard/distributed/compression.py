"""Formats in which parameters and gradients are sent, and the protocol of hooks that send them.

[Note: one rounding] A ring rounds its partial sums once per hop. Here each rank sends its part for every
other rank once, in an all-to-all, and the receiver sums in fp32: each addend is rounded once, as in ZeRO++
(Wang et al., arXiv:2306.10209). int8 gradients are rounded stochastically, so that their expectation is
exact. Parameters are rounded to the nearest, so that all ranks, and both gathers of a step, have the same.

[Note: two levels] Each node has P adjacent ranks of a group. A rank first receives, from the ranks of its
node, their gradients for the ranks with its position on every node, and sums them in fp32. Then it sends each
of these ranks one sum: P times fewer bytes leave a node. Both exchanges are all-to-alls of the whole group,
in which most ranks send each other nothing.

[Note: not finite] A block with NaN or an infinity has such a scale, and all of its elements become NaN or
infinite: a step that is skipped without compression is skipped with it.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fullshard.distributed.collectives import (
    REDUCTION,
    all_to_all_parts_pairwise,
    exchange_row_parts,
    gather_parts,
)
from fullshard.spec.settings.communication_section import (
    BLOCK,
    CommunicationSection,
    Format,
    rows_at_once,
    wire_bytes,
)


class UnitCommunication(Protocol):
    """Methods that gather and reduce one unit. The group is that of the ranks that shard it.

    `communication.hook` is a class of them without arguments, of which each unit has an instance. A hook may
    lack `gather` or `reduce`: fullshard then sends in its own way. It may lack both `state` and `load_state`.
    It has `wire_bytes(n, dtype)`, which returns the bytes in which `n` elements of `dtype` (fp32, bf16, fp16)
    are sent; for the planner. Only floating-point units come to it.
    """

    def gather(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns (W, n): the shards (n) of all ranks of the group. Equal on all ranks, the own row too."""
        ...

    def reduce(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the sum (n), in fp32, of this rank's row of the `parts` (W, n) of all ranks."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Returns this rank's state, such as errors to feed back, for checkpoints."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a `state`, whose tensors are on the CPU."""


class CompressedCommunication:
    """The built-in hook, which sends in the formats of [communication].

    near: number of ranks of a node that sum gradients first, P in [Note: two levels]; 1 for one level
    seed: of the random numbers by which int8 gradients are rounded; different on each rank
    """

    def __init__(self, section: CommunicationSection, *, near: int, seed: int) -> None:
        self._section, self._near, self._seed = section, near, seed
        self._generator: torch.Generator | None = None
        self._loaded: Tensor | None = None

    def gather(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ranks, n = group.size(), shard.numel()
        wires = gather_rows(encode(shard.view(1, n), self._section.gather).view(-1), group)
        whole = shard.new_empty(ranks, n)
        rows = rows_at_once(n)
        for wire, part in zip(wires.split(rows), whole.split(rows), strict=True):
            part.copy_(decode(wire, n))
        return whole

    def reduce(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        (ranks, n), near = parts.shape, self._near
        kind = self._section.reduce if near < ranks else "auto"
        noise = self._noise_of(parts.device) if kind == "int8" else None
        by_node = parts.view(-1, near, n).split(rows_at_once(near * n))
        wires = (encode(self._sum_within_node(some, group), kind, noise=noise) for some in by_node)
        far = range(group.rank() % near, ranks, near)
        received = exchange_rows(torch.cat([*wires]), group, among=far)
        total = torch.zeros(n, dtype=torch.float32, device=parts.device)
        for some in received.split(rows_at_once(n)):
            total += decode(some, n).sum(0)
        return total

    def _sum_within_node(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns (k, n): the sums over this node's ranks of this rank's place in `parts` (k, P, n)."""
        nodes, near, n = parts.shape
        if near == 1:
            return parts.view(nodes, n)
        first = group.rank() - group.rank() % near
        dtype = torch.bfloat16 if self._section.reduce_within == "bf16" else parts.dtype
        # The tensor that is sent has no name here, so it is freed before the sum is allocated.
        received = exchange_rows(
            parts.to(dtype).transpose(0, 1).reshape(-1, n), group, among=range(first, first + near)
        )
        return received.view(near, nodes, n).sum(0, dtype=torch.float32)

    def state(self) -> Mapping[str, Tensor]:
        return {} if self._generator is None else {"rng": self._generator.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._generator, self._loaded = None, state.get("rng")

    def _noise_of(self, device: torch.device) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed)
            if self._loaded is not None and self._loaded.shape == self._generator.get_state().shape:
                self._generator.set_state(self._loaded)
        return self._generator


def encode(rows: Tensor, kind: Literal["auto"] | Format, *, noise: torch.Generator | None = None) -> Tensor:
    """Returns `rows` (R, n) as they are sent, (R, `wire_bytes(kind, n)` / itemsize); unchanged for `auto`.

    noise: rounds int8 stochastically; None rounds to the nearest
    """
    if kind != "int8":
        return rows if kind == "auto" else rows.to(torch.bfloat16)
    count, n = rows.shape
    scaled = -(-n // BLOCK)
    blocks = pad(rows.float(), (0, scaled * BLOCK - n)).view(count, scaled, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    blocks = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    if noise is None:
        blocks = blocks.round_()
    else:
        blocks = blocks.add_(torch.rand(blocks.shape, generator=noise, device=rows.device)).floor_()
    wire = torch.zeros(count, wire_bytes(kind, n), dtype=torch.uint8, device=rows.device)
    wire[:, : 4 * scaled].view(torch.float32).copy_(scales.view(count, scaled))
    codes = blocks.clamp_(-127, 127).view(count, scaled * BLOCK)[:, :n]
    wire[:, 4 * scaled : 4 * scaled + n].view(torch.int8).copy_(codes)
    return wire


def decode(wire: Tensor, n: int) -> Tensor:
    """Returns the rows (R, n) in fp32 that `encode` made `wire` of."""
    if wire.is_floating_point():
        return wire.float()
    scaled = -(-n // BLOCK)
    codes = wire[:, 4 * scaled : 4 * scaled + n].view(torch.int8).float()
    blocks = pad(codes, (0, scaled * BLOCK - n)).view(len(wire), scaled, BLOCK)
    scales = wire[:, : 4 * scaled].view(torch.float32).unsqueeze(-1)
    return (blocks * scales).view(len(wire), scaled * BLOCK)[:, :n]


def gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns (W, m): the `row` (m) of each rank of the group. Collective."""
    return gather_parts(row, group.group_name, direct=row.is_cpu)


def exchange_rows(rows: Tensor, group: dist.ProcessGroup, *, among: range | None = None) -> Tensor:
    """Returns (R, m): the rows for this rank in the `rows` (R, m) of each rank of the group. Collective.

    among: the ranks of the group that exchange rows with this rank, in order, an equal number of rows with
        each; None: all ranks
    """
    among = among or range(group.size())
    if len(among) == 1:
        return rows
    counts = [len(rows) // len(among) if one in among else 0 for one in range(group.size())]
    if not rows.is_cpu:
        return exchange_row_parts(rows, counts, received=counts, group=group.group_name, direct=False)
    received = torch.empty_like(rows)
    sent, into = rows.split(counts), received.split(counts)
    all_to_all_parts_pairwise(sent, into, group=group, tag=REDUCTION, kind="reduce_scatter")
    return received
