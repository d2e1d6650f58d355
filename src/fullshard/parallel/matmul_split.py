"""Divides the matmuls of a model over ranks: one method for each kind of module.

[Note: gathered again]
Matmuls of gathered sequences may save only this rank's part for backward, and gather again there. Several
matmuls may read one gathered tensor: queries, keys and values, or gate and up. The first of them to run in
backward gathers, and the last frees. See arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import gather_sequence, indivisible_length_error, reduce_sequence
from fullshard.distributed.tensors import (
    find_linear_function,
    multiply_by_own_weight,
    set_linear_function,
)
from fullshard.errors import ShardError
from fullshard.models.deferred_logits import DividedHead, VocabularyPart, set_divided_head
from fullshard.models.packed_weights import multiply_own_columns, packed_weight_of

_ATTRIBUTE = "_fullshard_gathered_from"


@dataclass
class MatmulSplit:
    """The division of one model over `ranks` ranks.

    See [Note: tensor and sequence parallel] in `fullshard.parallel.tensor_parallel`.

    gathers_again: see [Note: saved parts]
    dims: id of each divided parameter -> its divided dim; all others are whole
    """

    ranks: int
    rank: int
    group: str
    gathers_again: bool
    dims: dict[int, int] = field(default_factory=dict[int, int])

    def gather_tokens(self, x: Tensor) -> Tensor:
        if self.gathers_again:
            return gather_for_matmuls(x, ranks=self.ranks, group=self.group)
        return gather_sequence(x, self.ranks, 1, self.group)

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        return reduce_sequence(x, self.ranks, 1, self.group)

    def gather_output(self, module: Any) -> None:
        """Makes `module`, which computes with this rank's tokens, return the outputs of all ranks."""
        forward = module.forward

        def gathering_forward(*args: Any, **kwargs: Any) -> Any:  # signature: the module's own
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return (self.gather_tokens(output[0]), *output[1:])
            return self.gather_tokens(output)

        module.forward = gathering_forward

    def gather_input(self, module: Any) -> None:
        """Makes `module`, which gets this rank's tokens, compute with those of all ranks."""
        _transform_input_hidden_states(module, self.gather_tokens)

    def cut_input(self, module: Any) -> None:
        """Makes `module`, which gets the tokens of all ranks, compute with this rank's."""

        def cut(whole: Tensor) -> Tensor:
            length = whole.shape[-2] // self.ranks
            return whole.narrow(-2, self.rank * length, length)

        _transform_input_hidden_states(module, cut)

    def make_column_parallel(self, linear: Any) -> None:
        """Divides the rows of the weight of `linear`, and of its adapters' second matrices."""
        base, firsts, seconds = linear_and_adapter_matrices(linear)
        for one in (base, *seconds):
            self.dims |= {id(parameter): 0 for parameter in one.parameters()}
        for one in (base, *firsts):
            _replace_forward(one)

    def make_row_parallel(self, linear: Any, *, cuts_input: bool = False) -> None:
        """Divides the columns of the weight of `linear`, and of its adapters' first matrices.

        cuts_input: whether its input has all columns, not this rank's
        """
        base, firsts, _ = linear_and_adapter_matrices(linear)
        self.dims |= {id(one.weight): 1 for one in (base, *firsts)}
        columns = base.in_features // self.ranks
        if packed_weight_of(base) is not None:  # whole rows on each rank
            del self.dims[id(base.weight)]
            multiply_own_columns(base, part=self.rank, parts=self.ranks)
        _replace_forward(base, adds_bias=False)
        add = linear.forward

        def reducing_forward(x: Tensor) -> Tensor:
            if cuts_input:
                x = x.narrow(-1, self.rank * columns, columns)
            y = self.reduce_scatter_tokens(add(x))
            return y if base.bias is None else y + base.bias

        linear.forward = reducing_forward

    def divide_kv_projection(self, projection: Any, *, kv_heads: int) -> None:
        """Divides the heads of keys or values. If they are fewer than ranks, several ranks compute each."""
        if kv_heads % self.ranks == 0:
            self.make_column_parallel(projection)
            return
        rows = projection.out_features // kv_heads
        begin = self.rank // (self.ranks // kv_heads) * rows
        self.compute_with_rows_only(projection, [slice(begin, begin + rows)])

    def own_rows_of_fused_weight(self, linear: Any, *, parts: int) -> list[slice]:
        """Returns this rank's rows of each of the equal `parts` of a packed weight."""
        whole = linear.out_features // parts
        own = whole // self.ranks
        return [slice(p * whole + self.rank * own, p * whole + (self.rank + 1) * own) for p in range(parts)]

    def compute_with_rows_only(self, linear: Any, rows: list[slice]) -> None:
        """Makes `linear`, whose weight is whole on each rank, compute with these rows of it."""
        base, firsts, seconds = linear_and_adapter_matrices(linear)
        for one in (base, *seconds):
            _replace_forward(one, rows=rows)
        for one in firsts:
            _replace_forward(one)

    def divide_embedding(self, embedding: Any, *, scatters: bool) -> None:
        """Divides the vocabulary of an embedding.

        scatters: whether it returns this rank's tokens, or those of all ranks
        """
        self.dims[id(embedding.weight)] = 0
        part, forward = self._vocabulary_part(embedding.num_embeddings), embedding.forward
        padding = embedding.padding_idx
        own_padding = padding - part.first_token if padding in part.tokens else None

        def embed(tokens: Tensor) -> Tensor:
            if tokens.shape[1] % self.ranks:
                raise indivisible_length_error(tokens.shape[1], ranks=self.ranks, pieces=1)
            rows, own = part.local_rows_and_mask(tokens)
            embedding.padding_idx = own_padding  # for `forward` alone: initialisers read it too
            try:
                values = forward(rows)
            finally:
                embedding.padding_idx = padding
            # (batch, sequence, width): not 0 on one rank
            cut = self.reduce_scatter_tokens(torch.where(own.unsqueeze(-1), values, 0.0))
            return cut if scatters else self.gather_tokens(cut)

        embedding.forward = embed

    def divide_head(self, head: Any) -> None:
        """Divides the vocabulary of the head. Called directly, the head returns whole logits."""
        self.make_column_parallel(head)
        part = self._vocabulary_part(head.out_features)
        own: Callable[[Tensor], Tensor] = head.forward
        set_divided_head(head, DividedHead(part, own))
        head.forward = lambda x: part.gather_logits(own(x))

    def _vocabulary_part(self, size: int) -> VocabularyPart:
        return VocabularyPart(size, self.ranks, self.rank, self.group)


def linear_and_adapter_matrices(linear: Any) -> tuple[Any, list[Any], list[Any]]:
    """Returns (linear module, first matrices of its adapters, second matrices)."""
    if not hasattr(linear, "base_layer"):
        return linear, [], []
    if len(getattr(linear, "lora_variant", ())) or not isinstance(linear.base_layer, nn.Linear):
        raise ShardError(
            "the matmuls of this kind of adapter cannot be divided over ranks.",
            got=f"a variant of LoRA on {type(linear.base_layer).__name__}",
            why="its output is not a sum of the outputs that ranks compute",
            fix="adapter.options without variants, or sharding.tensor_parallel = 1",
        )
    return linear.base_layer, [*linear.lora_A.values()], [*linear.lora_B.values()]


def _replace_forward(linear: Any, *, rows: list[slice] | None = None, adds_bias: bool = True) -> None:
    """Makes a linear module compute with its local weight, or only with these `rows` of a whole weight."""
    if find_linear_function(linear) is None:
        set_linear_function(linear, multiply_gathered)
    linear.forward = partial(multiply_by_own_weight, linear, rows=rows, adds_bias=adds_bias)


def _transform_input_hidden_states(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Applies `change` to the hidden states that `module` gets: its first argument, or `hidden_states`."""
    forward = module.forward

    def changed_forward(*args: Any, **kwargs: Any) -> Any:  # signature: the module's own
        if args:
            return forward(change(args[0]), *args[1:], **kwargs)
        return forward(**kwargs | {"hidden_states": change(kwargs["hidden_states"])})

    module.forward = changed_forward


# See [Note: gathered again] #
class _RegatheredTensor:
    """The gathered tensor while backward needs it."""

    def __init__(self, ranks: int, group: str) -> None:
        self.ranks, self.group = ranks, group
        self.readers = 0  # matmuls whose backward reads it
        self._left, self._whole = 0, None

    def gather(self, part: Tensor) -> Tensor:
        """Returns the gathered tensor to one of the readers."""
        if self._whole is None:
            self._whole, self._left = gather_sequence(part, self.ranks, 1, self.group), self.readers
        whole, self._left = self._whole, self._left - 1
        if not self._left:
            self._whole = None
        return whole


class _PartToRegather(NamedTuple):
    """The part that a gathered tensor was gathered from, and its state in backward."""

    part: Tensor
    backward: _RegatheredTensor


def gather_for_matmuls(part: Tensor, *, ranks: int, group: str) -> Tensor:
    """Returns whole sequences (..., sequence, channels), of which `multiply_gathered` saves only `part`."""
    whole = gather_sequence(part, ranks, 1, group)
    if torch.is_grad_enabled():
        setattr(whole, _ATTRIBUTE, _PartToRegather(part.detach(), _RegatheredTensor(ranks, group)))
    return whole


def multiply_gathered(x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    """Returns F.linear(x, weight, bias). If `x` is from `gather_for_matmuls`, backward gathers it again."""
    source: _PartToRegather | None = getattr(x, _ATTRIBUTE, None)
    if source is None or not weight.requires_grad:
        return F.linear(x, weight, bias)
    return _LinearRegatheringInBackward.apply(x, weight, bias, source)  # pyright: ignore[reportReturnType]


class _LinearRegatheringInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: _PartToRegather) -> Tensor:
        ctx.save_for_backward(source.part, weight)
        ctx.gathered = source.backward
        ctx.gathered.readers += 1
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        part, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_weight = rows.t() @ ctx.gathered.gather(part).flatten(0, -2)
        of_bias = rows.sum(0) if needs_bias else None
        return gradient @ weight if needs_input else None, of_weight, of_bias, None
