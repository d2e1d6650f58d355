"""Attention over sequences whose tokens are divided over ranks (context parallel).

Everything else in a decoder treats tokens one by one. Each rank has the queries of its own tokens, and
attends to the keys of all earlier ones, with either of two methods:

gather   The ranks gather each layer's keys and values (Llama 3, arXiv:2407.21783, section 3.3.2). Backward
         sums their gradients over ranks. A rank has two pieces of each sequence: see [Note: order of
         pieces] in `distributed.sequence_parts`.
ulysses  The ranks exchange their parts of the sequence for parts of the heads, attend, and exchange back
         (DeepSpeed-Ulysses, arXiv:2309.14509). The ranks divide the query heads. If there are fewer
         key/value heads than ranks, each is sent to several ranks.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fullshard.distributed.sequence_parts import SequencePart, exchange_heads, gather_sequence
from fullshard.errors import TrainError
from fullshard.models.document_attention import (
    QueryKeyValue,
    attend_causally,
    attend_within_documents,
    is_document_bounds,
    mask_of_queries,
    square_mask,
)


@dataclass(frozen=True)
class ContextParallel:
    """How attention of a model reaches the keys of other ranks.

    group: name of the process group of the ranks that share a sequence
    """

    method: Literal["gather", "ulysses"]
    part: SequencePart
    group: str = ""

    @property
    def name(self) -> str:
        """A name that contexts share only if they do the same."""
        part = self.part
        return f"{self.method}_{part.rank}_of_{part.ranks}_in_{self.group}"

    def check_bounds_are_given(self, mask: Tensor | None, *, training: bool) -> None:
        """Raises TrainError in training without bounds: a token would attend only to tokens of its rank."""
        if training and (mask is None or not is_document_bounds(mask)):
            raise TrainError(
                "the model was given a part of a sequence without the bounds of its documents.",
                got="no document_bounds",
                why="its attention would see only the tokens of this rank",
                fix="loss = fullshard.next_token_loss on batches of fullshard.cut_sequences(batch, plan)",
            )

    def attend_causally(self, inputs: QueryKeyValue, mask: Tensor | None, *, training: bool) -> Tensor:
        """Computes `document_attention.attend_causally`; with bounds, of this rank's part of sequences."""
        self.check_bounds_are_given(mask, training=training)
        if mask is not None and is_document_bounds(mask):
            return self.attend(inputs, mask)
        return attend_causally(inputs, mask)

    def attend(
        self, inputs: QueryKeyValue, bounds: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Returns causal attention of this rank's queries, (batch, sequence / ranks, heads, head_dim).

        inputs: of this rank's tokens, (batch, heads, sequence / ranks, head_dim)
        bounds: the documents of whole sequences, see `fullshard.models.document_attention`
        scale, window: as in `attend_within_documents`
        """
        if self.method == "gather":
            whole = inputs._replace(key=self._gather(inputs.key), value=self._gather(inputs.value))
            begins = self.part.begins(whole.key.shape[2])
            return attend_within_documents(whole, bounds, scale=scale, window=window, begins=begins)
        ranks, heads = self.part.ranks, inputs.key.shape[1]
        repeats = ranks // heads if heads < ranks else 1
        keys = [one.repeat_interleave(repeats, dim=1) if repeats > 1 else one for one in inputs[1:]]
        whole = QueryKeyValue(
            *(exchange_heads(one, ranks, True, self.group) for one in (inputs.query, *keys))
        )
        y = attend_within_documents(whole, bounds, scale=scale, window=window)
        return exchange_heads(y.transpose(1, 2), ranks, False, self.group).transpose(1, 2)

    def gather_for_masked_attention(
        self, inputs: QueryKeyValue, bounds: Tensor, *, window: int | None
    ) -> tuple[QueryKeyValue, Tensor]:
        """Returns inputs with the keys of whole sequences, and the mask of this rank's queries.

        The mask is bool (batch, 1, sequence / ranks, sequence), True where attended to.
        """
        whole = inputs._replace(key=self._gather(inputs.key), value=self._gather(inputs.value))
        rows, length = whole.key.shape[0], whole.key.shape[2]
        mask = square_mask(bounds, rows=rows, length=length, window=window)
        begins, queries = self.part.begins(length), inputs.query.shape[2]
        return whole, mask_of_queries(mask, begins=begins, queries=queries)

    def _gather(self, part: Tensor) -> Tensor:
        return gather_sequence(part, self.part.ranks, self.part.pieces, self.group)
