"""Sequences whose tokens are divided over ranks: which tokens a rank has, and the collectives between them.

[Note: order of pieces]
With causal attention, later tokens attend to more keys. So ranks that attend to each other's keys have two
pieces of each sequence: rank r of R has pieces r and 2R - 1 - r, and all ranks compute the same number of
pairs. Ranks that share matmuls have one piece each: rank r has piece r.

The collectives are operations of torch, with gradients and with shapes on fake tensors, so that they can be
compiled and traced. `group` is the name of a process group (`dist.ProcessGroup.group_name`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullshard.distributed.agreement import rank
from fullshard.distributed.collectives import gather_parts, reduce_parts
from fullshard.distributed.ranges import TimedRange
from fullshard.errors import TrainError
from fullshard.quantities import count_text
from fullshard.spec.plan import Plan
from fullshard.torch_private.groups import group_of_name

GATHER, REDUCE = "gather_sequence", "reduce_sequence"
REDUCE_ALL = "reduce_over_ranks"
"""Names of the operations, in the namespace `fullshard`, and of the ranges of their collectives."""


PIECES = 2  # of each sequence, on each rank of a SequencePart


@dataclass(frozen=True)
class SequencePart:
    """The two pieces of each sequence that one of `ranks` ranks has. See [Note: order of pieces]."""

    ranks: int
    rank: int

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> Self:
        """Returns the part that global rank `rank` has."""
        ranks = plan.context_parallel
        return cls(ranks, rank // plan.tensor_parallel % ranks)

    def piece_starts(self, length: int) -> list[int]:
        """Returns where this rank's pieces begin in a sequence of `length` tokens."""
        piece = length // (self.ranks * PIECES)
        return [self.rank * piece, (2 * self.ranks - 1 - self.rank) * piece]

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of `whole` (rows, sequence, ...)."""
        length = whole.shape[1]
        piece = length // (self.ranks * PIECES)
        return torch.cat([whole[:, begin : begin + piece] for begin in self.piece_starts(length)], dim=1)

    def cut_batch(self, batch: Any) -> dict[str, Any]:
        """Returns this rank's part of a batch of whole sequences.

        batch["tokens"], batch["labels"]: (rows, sequence); labels are the next tokens, and so are cut as well
        batch["positions"]: optional, made if it is absent
        batch["documents"], batch["document_ends"]: optional; replaced by `document_bounds` of all tokens, see
            `fullshard.models.document_attention`
        Other tensors (rows, sequence, ...) are cut as well, and all else is unchanged.

        Raises TrainError for any other batch, and for a length that the pieces do not divide.
        """
        tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor) or "labels" not in batch:
            keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise TrainError(
                "only batches of tokens and labels can be cut into parts of sequences.",
                got=f"{type(batch).__name__}{keys}",
                fix="sharding.context_parallel = 1, or batches with tokens and labels (rows, sequence)",
            )
        rows, length = tokens.shape
        if length % (self.ranks * PIECES):
            raise indivisible_length_error(length, ranks=self.ranks, pieces=PIECES)
        given: dict[str, Any] = dict(batch)
        documents, ends = given.pop("documents", None), given.pop("document_ends", None)
        if ends is None:
            ends = _document_ends(documents, rows=rows, length=length)
        if given.get("positions") is None:
            given["positions"] = positions_within_documents(
                torch.zeros_like(tokens) if documents is None else documents
            )
        pinned = tokens.is_pinned()
        for name, whole in given.items():
            if isinstance(whole, Tensor) and whole.shape[:2] == tokens.shape:
                own = self.cut(whole)
                given[name] = own.pin_memory() if pinned else own
        return given | {"document_bounds": flatten_document_ends_to_bounds(ends, sequence_length=length)}


def cut_sequences(batch: Any, plan: Plan) -> Any:
    """Returns this rank's part of a microbatch of whole sequences, as `SequencePart.cut_batch` does.

    Returns `batch` unchanged if the plan does not divide sequences.

    >>> part = fs.cut_sequences({"tokens": tokens, "labels": labels}, plan)
    >>> part["tokens"].shape[1] == tokens.shape[1] // plan.run.sharding.context_degree
    True
    """
    return batch if plan.context_parallel == 1 else SequencePart.from_plan(plan, rank()).cut_batch(batch)


def positions_within_documents(documents: Tensor) -> Tensor:
    """Returns (batch, sequence): for each token, the number of earlier tokens of its document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def flatten_document_ends_to_bounds(ends: Tensor, *, sequence_length: int) -> Tensor:
    """Returns the bounds of all documents of a microbatch: see `fullshard.models.document_attention`.

    ends: (microbatch, documents), int32: where each document ends in its row; the last is the row's end
    """
    rows = torch.arange(len(ends), device=ends.device, dtype=torch.int32) * sequence_length
    return F.pad((ends + rows[:, None]).flatten(), (1, 0)).view(1, 1, 1, -1)


def indivisible_length_error(length: int, *, ranks: int, pieces: int) -> TrainError:
    """Returns the error for sequences that cannot be cut into equal pieces."""
    each = ranks * pieces
    return TrainError(
        f"sequences of {length:,} tokens cannot be cut into {each} equal pieces.",
        got=f"{ranks} ranks, with {count_text(pieces, 'piece')} each",
        fix=f"data.sequence_length = {max(length // each, 1) * each:,} or {(length // each + 1) * each:,}",
    )


def _document_ends(documents: Tensor | None, *, rows: int, length: int) -> Tensor:
    """Returns (rows, documents), int32: where each document ends; without numbers, rows are documents."""
    if documents is None:
        return torch.full((rows, 1), length, dtype=torch.int32)
    ends = [(row[1:] != row[:-1]).nonzero().flatten() + 1 for row in documents.cpu()]
    padded = [F.pad(own, (0, max(map(len, ends)) + 1 - len(own)), value=length) for own in ends]
    return torch.stack(padded).to(torch.int32)


@torch.library.custom_op(f"fullshard::{GATHER}", mutates_args=())
def gather_sequence(part: Tensor, ranks: int, pieces: int, group: str) -> Tensor:  # signature: torch's
    """Returns whole sequences (..., sequence, channels) in order. Collective.

    part: this rank's part (..., sequence / ranks, channels)
    """
    with TimedRange(GATHER):
        gathered = gather_parts(part, group, direct=part.device.type == "cpu")
    if pieces == 1:
        return gathered.movedim(0, -3).flatten(-3, -2)  # copies nothing if there is one sequence
    cut = [one.chunk(pieces, dim=-2) for one in gathered]
    return torch.cat([one[0] for one in cut] + [one[1] for one in reversed(cut)], dim=-2)


@torch.library.custom_op(f"fullshard::{REDUCE}", mutates_args=())
def reduce_sequence(whole: Tensor, ranks: int, pieces: int, group: str) -> Tensor:  # signature: torch's
    """Returns this rank's part (..., sequence / ranks, channels) of the sum over ranks. Collective.

    whole: (..., sequence, channels)
    """
    if pieces == 1:
        parts = whole.unflatten(-2, (ranks, -1)).movedim(-3, 0)  # contiguous already if there is one sequence
        own_copy = whole.device.type == "cpu"  # DirectReduceScatter overwrites its input
        stacked = parts.clone(memory_format=torch.contiguous_format) if own_copy else parts.contiguous()
    else:
        chunks = whole.chunk(ranks * pieces, dim=-2)
        stacked = torch.stack([torch.cat([chunks[r], chunks[-1 - r]], dim=-2) for r in range(ranks)])
    with TimedRange(REDUCE):
        return reduce_parts(stacked, group, direct=whole.device.type == "cpu")


@torch.library.custom_op(f"fullshard::{REDUCE_ALL}", mutates_args=())
def reduce_over_ranks(x: Tensor, maximum: bool, group: str) -> Tensor:  # signature: torch's
    """Returns the sum, or the `maximum`, of `x` over ranks. Only the sum has a gradient. Collective."""
    reduced = x.clone()
    with TimedRange(REDUCE_ALL):
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(reduced, op=op, group=group_of_name(group))
    return reduced


@reduce_over_ranks.register_fake
def _fake_reduce_over_ranks(x: Tensor, maximum: bool, group: str) -> Tensor:  # signature: torch's
    return torch.empty_like(x)


@gather_sequence.register_fake
def _fake_gather_sequence(part: Tensor, ranks: int, pieces: int, group: str) -> Tensor:  # signature: torch's
    return part.new_empty((*part.shape[:-2], ranks * part.shape[-2], part.shape[-1]))


@reduce_sequence.register_fake
def _fake_reduce_sequence(whole: Tensor, ranks: int, pieces: int, group: str) -> Tensor:  # signature: torch's
    return whole.new_empty((*whole.shape[:-2], whole.shape[-2] // ranks, whole.shape[-1]))


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # signature: torch's
    ctx.rest = inputs[1:]


@partial(gather_sequence.register_autograd, setup_context=_save_arguments)
def _gather_sequence_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    return (reduce_sequence(gradient, *ctx.rest), None, None, None)


@partial(reduce_sequence.register_autograd, setup_context=_save_arguments)
def _reduce_sequence_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    return (gather_sequence(gradient, *ctx.rest), None, None, None)


@partial(reduce_over_ranks.register_autograd, setup_context=_save_arguments)
def _reduce_over_ranks_backward(
    ctx: Any, gradient: Tensor
) -> tuple[Tensor, None, None]:  # signature: torch's
    maximum, group = ctx.rest
    assert not maximum, "the maximum has no gradient"
    return (reduce_over_ranks(gradient.contiguous(), False, group), None, None)
