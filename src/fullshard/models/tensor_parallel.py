"""Models whose matmuls are divided over ranks (tensor parallel), with the sequence divided between them.

[Note: tensor and sequence parallel]
T adjacent ranks share each matmul: arXiv:1909.08053, with the sequence parallelism of arXiv:2205.05198.
Between matmuls, each rank has 1/T of the tokens; within, all tokens, and 1/T of the heads or columns:

    x (tokens / T) ── norm ── gather ── query, key, value ── attention ── output ── reduce ── + x
                    (tokens / T)      (heads / T)                     (sums over heads)   (tokens / T)

column      the rows of the weight are divided: a Linear as it is, with fewer output features
row         the columns are divided: each rank has one summand of the output, which is reduced and scattered
packed      two column weights in one, of which each is divided; every rank has all of it, and uses its rows
kv heads    fewer than ranks: their weights are whole, and each rank computes the head that its queries use
embedding   its rows are divided; the sum over ranks has one summand that is not 0
head        its rows are divided; the default loss never gathers its logits, any other code gets them whole

[Note: whole parameters]
A parameter that each rank has whole, such as a norm's, is used for the rank's own tokens or heads alone. So
its gradient on one rank is a summand, and `fullshard.training.gradients` sums these once per step. All that a
rank computes between embedding and head obeys this rule, also before the first block and after the last.

Forwards are replaced, not modules, so names in checkpoints stay. The modules compute with local tensors: see
[Note: DTensors are storage] in `fullshard.sharding.split_parameters`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import gather_sequence, indivisible_length_error, reduce_sequence
from fullshard.distributed.vocabulary_part import VocabularyPart
from fullshard.errors import ShardError
from fullshard.models.decoder import DecoderModel
from fullshard.models.deferred_logits import DividedHead, set_divided_head
from fullshard.models.huggingface import is_causal_lm
from fullshard.models.tensor_parallel_hf import read_transformers_split
from fullshard.spec.plan import Plan
from fullshard.spec.tensor_split import check_decoder_can_be_split


def use_tensor_parallel(model: nn.Module, plan: Plan, *, rank: int, group: str) -> dict[str, int | None]:
    """Divides the matmuls of `model` over ranks. Returns the dim in which each parameter is divided, by name.

    The parameters themselves are divided when the model is sharded; None: each rank has the whole parameter.

    rank: global rank; those of one group are adjacent
    group: name of the process group of the ranks that share matmuls; fake tensors need none

    `model` is the reference decoder, or a causal language model of transformers whose config has a plan of
    its matmuls (`base_model_tp_plan`). Raises ShardError for others, and for sizes that the ranks cannot
    divide.
    """
    split = _Split(plan.tensor_parallel, rank % plan.tensor_parallel, group)
    if isinstance(model, DecoderModel):
        check_decoder_can_be_split(model.config, plan.tensor_parallel)
        _divide_decoder(model, split)
    elif is_causal_lm(model):
        _divide_transformers_model(model, split)
    else:
        raise ShardError(
            f"the matmuls of {type(model).__name__} cannot be divided over ranks.",
            got=f"sharding.tensor_parallel = {plan.tensor_parallel}",
            why="nothing says which of its weights are divided by rows, and which by columns",
            fix="sharding.tensor_parallel = 1",
        )
    return {name: split.dims.get(id(parameter)) for name, parameter in model.named_parameters()}


def _divide_decoder(model: DecoderModel, split: "_Split") -> None:
    kv_heads = model.config.kv_heads
    split.divide_embedding(model.embedding, scatters=True)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            split.gather_output(module)
    for block in model.blocks:
        attention: Any = block.attention
        feed_forward: Any = block.feed_forward
        for column in (attention.query, feed_forward.gate, feed_forward.up):
            split.divide_columns(column)
        for projection in (attention.key, attention.value):
            split.divide_kv_projection(projection, kv_heads=kv_heads)
        for row in (attention.output, feed_forward.down):
            split.divide_row(row)
    split.divide_head(model.head)


def _divide_transformers_model(model: Any, split: "_Split") -> None:
    found = read_transformers_split(model, ranks=split.ranks)
    split.divide_embedding(model.get_input_embeddings(), scatters=False)
    split.cut_input(found.layers[0])
    for container in found.containers:
        split.gather_input(container)
    for column in found.columns:
        split.divide_columns(column)
    for projection in found.kv_projections:
        split.divide_kv_projection(projection, kv_heads=found.kv_heads)
    for attention in found.attentions:
        own_kv_heads = max(found.kv_heads // split.ranks, 1)
        attention.num_key_value_groups = found.query_heads // split.ranks // own_kv_heads
    for packed in found.packed:
        split.use_rows(packed, split.rows_of_parts(packed, parts=2))
    for row in found.rows:
        split.divide_row(row)
    for row in found.split_rows:
        split.divide_row(row, cuts_input=True)
    split.gather_output(found.layers[-1])
    split.divide_head(model.get_output_embeddings())


@dataclass
class _Split:
    """The division of one model over `ranks` ranks. See [Note: tensor and sequence parallel].

    dims: id of each divided parameter -> its divided dim; all others are whole
    """

    ranks: int
    rank: int
    group: str
    dims: dict[int, int] = field(default_factory=dict[int, int])

    def gather(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.ranks, 1, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        return reduce_sequence(x, self.ranks, 1, self.group)

    def gather_output(self, module: Any) -> None:
        """Makes `module`, which computes with this rank's tokens, return the outputs of all."""
        forward = module.forward

        def gathering_forward(*args: Any, **kwargs: Any) -> Any:  # signature: the module's own
            output = forward(*args, **kwargs)
            return (self.gather(output[0]), *output[1:]) if isinstance(output, tuple) else self.gather(output)

        module.forward = gathering_forward

    def gather_input(self, module: Any) -> None:
        """Makes `module` compute with the tokens of all ranks, although it gets this rank's."""
        _replace_hidden_states(module, self.gather)

    def cut_input(self, module: Any) -> None:
        """Makes `module` compute with this rank's tokens, although it gets those of all ranks."""

        def cut(whole: Tensor) -> Tensor:
            length = whole.shape[-2] // self.ranks
            return whole.narrow(-2, self.rank * length, length)

        _replace_hidden_states(module, cut)

    def divide_columns(self, linear: nn.Linear) -> None:
        self.dims |= {id(parameter): 0 for parameter in linear.parameters()}

    def divide_row(self, linear: Any, *, cuts_input: bool = False) -> None:
        """Divides the columns of a weight. `cuts_input`: its input has all columns, not this rank's."""
        self.dims[id(linear.weight)] = 1
        columns = linear.in_features // self.ranks

        def reducing_forward(x: Tensor) -> Tensor:
            if cuts_input:
                x = x.narrow(-1, self.rank * columns, columns)
            y = self.reduce(F.linear(x, linear.weight))
            return y if linear.bias is None else y + linear.bias

        linear.forward = reducing_forward

    def divide_kv_projection(self, projection: nn.Linear, *, kv_heads: int) -> None:
        if kv_heads % self.ranks == 0:
            self.divide_columns(projection)
            return
        rows = projection.out_features // kv_heads
        begin = self.rank // (self.ranks // kv_heads) * rows
        self.use_rows(projection, [slice(begin, begin + rows)])

    def rows_of_parts(self, linear: nn.Linear, *, parts: int) -> list[slice]:
        """Returns this rank's rows of each of the equal `parts` of a packed weight."""
        whole = linear.out_features // parts
        own = whole // self.ranks
        return [slice(p * whole + self.rank * own, p * whole + (self.rank + 1) * own) for p in range(parts)]

    def use_rows(self, linear: Any, rows: list[slice]) -> None:
        """Makes `linear`, whose weight each rank has whole, compute with these rows of it."""

        def select(whole: Tensor) -> Tensor:
            return whole[rows[0]] if len(rows) == 1 else torch.cat([whole[one] for one in rows])

        linear.forward = lambda x: F.linear(  # pyright: ignore[reportUnknownLambdaType]
            x, select(linear.weight), None if linear.bias is None else select(linear.bias)
        )

    def divide_embedding(self, embedding: Any, *, scatters: bool) -> None:
        """Divides the vocabulary of an embedding.

        scatters: whether it returns this rank's tokens, or those of all ranks
        """
        self.dims[id(embedding.weight)] = 0
        part, forward = self._vocabulary_part(embedding.num_embeddings), embedding.forward
        if (padding := embedding.padding_idx) is not None:
            row, own = part.local_tokens(torch.tensor(padding))
            embedding.padding_idx = int(row) if own else None

        def embed(tokens: Tensor) -> Tensor:
            if tokens.shape[1] % self.ranks:
                raise indivisible_length_error(tokens.shape[1], ranks=self.ranks, pieces=1)
            rows, own = part.local_tokens(tokens)
            # (batch, sequence, width): not 0 on one rank
            cut = self.reduce(torch.where(own.unsqueeze(-1), forward(rows), 0.0))
            return cut if scatters else self.gather(cut)

        embedding.forward = embed

    def divide_head(self, head: Any) -> None:
        self.divide_columns(head)
        part = self._vocabulary_part(head.out_features)
        own: Callable[[Tensor], Tensor] = head.forward
        set_divided_head(head, DividedHead(part, own))

        def whole_logits(x: Tensor) -> Tensor:
            return part.gather_logits(own(x))

        head.forward = whole_logits

    def _vocabulary_part(self, size: int) -> VocabularyPart:
        return VocabularyPart(size, self.ranks, self.rank, self.group)


def _replace_hidden_states(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Makes `module` compute with changed hidden states, its first argument or that of this name."""
    forward = module.forward

    def changed_forward(*args: Any, **kwargs: Any) -> Any:  # signature: the module's own
        if args:
            return forward(change(args[0]), *args[1:], **kwargs)
        return forward(**kwargs | {"hidden_states": change(kwargs["hidden_states"])})

    module.forward = changed_forward
