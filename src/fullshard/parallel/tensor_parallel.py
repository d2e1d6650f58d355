"""Models whose matmuls are divided over ranks (tensor parallel), with the sequence divided between them.

[Note: tensor and sequence parallel]
T adjacent ranks share each matmul: arXiv:1909.08053, with the sequence parallelism of arXiv:2205.05198.
Between matmuls, each rank has 1/T of the tokens; within, all tokens, and 1/T of the heads or columns:

    x (tokens / T) ── norm ── gather ── query, key, value ── attention ── output ── reduce ── + x
                    (tokens / T)      (heads / T)                     (sums over heads)   (tokens / T)

column      the rows of the weight are divided: a Linear with fewer output features, see [Note: saved parts]
row         the columns are divided: each rank has one summand of the output, which is reduced and scattered
packed      two column weights in one, of which each is divided; every rank has all of it, and uses its rows
kv heads    fewer than ranks: their weights are whole, and each rank computes the head that its queries use
experts     whole: each rank's tokens go to all of them, see `fullshard.parallel.expert_parallel`
embedding   its rows are divided; the sum over ranks has one summand that is not 0
head        its rows are divided; the default loss never gathers its logits, any other code gets them whole

[Note: whole parameters]
A parameter that each rank has whole, such as a norm's, is used for the rank's own tokens or heads alone. So
its gradient on one rank is a summand, and `fullshard.training.gradients` sums these once per step. All that a
rank computes between embedding and head obeys this rule, also before the first block and after the last.

[Note: saved parts]
Eager blocks without recompute save this rank's part of a gathered input for backward, and gather it again
(`gather_for_matmuls`). A block that recomputes all gathers it anyway, and a compiled one saves
what the compiler chooses, which is the whole input.

Forwards are replaced, not modules, so names in checkpoints stay. The modules compute with local tensors: see
[Note: DTensors are storage] in `fullshard.parallel.model_parallel`.
"""

from typing import Any

from torch import nn

from fullshard.errors import ShardError
from fullshard.models.decoder import DecoderModel, Mixture
from fullshard.models.huggingface import is_causal_lm
from fullshard.parallel.matmul_split import MatmulSplit
from fullshard.parallel.tensor_parallel_styles import divide_by_styles, divide_transformers_model
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import check_decoder_can_be_split


def use_tensor_parallel(model: nn.Module, plan: Plan, *, rank: int, group: str) -> dict[str, int | None]:
    """Divides the matmuls of `model` over ranks. Returns the dim in which each parameter is divided, by name.

    The parameters themselves are divided when the model is sharded; None: each rank has the whole parameter.

    rank: global rank; those of one group are adjacent
    group: name of the process group of the ranks that share matmuls; fake tensors need none

    `model` is the reference decoder, a causal language model of transformers whose config has a plan of its
    matmuls (`base_model_tp_plan`), or any whose modules `sharding.tensor_parallel_styles` names. Raises
    ShardError for others, and for sizes that the ranks cannot divide.
    """
    recompute = plan.run.recompute
    recomputes_all = recompute.mode in ("full", "selective") and recompute.blocks is None
    gathers_again = not recomputes_all and plan.run.run.compile is not True
    split = MatmulSplit(plan.tensor_parallel, rank % plan.tensor_parallel, group, gathers_again)
    if styles := plan.run.sharding.tensor_parallel_styles:
        divide_by_styles(model, split, styles=styles)
    elif isinstance(model, DecoderModel):
        check_decoder_can_be_split(model.config, plan.tensor_parallel)
        _divide_decoder(model, split)
    elif is_causal_lm(model):
        divide_transformers_model(model, split)
    else:
        raise ShardError(
            f"the matmuls of {type(model).__name__} cannot be divided over ranks.",
            got=f"sharding.tensor_parallel = {plan.tensor_parallel}",
            why="nothing says which of its weights are divided by rows, and which by columns",
            fix="sharding.tensor_parallel_styles, or sharding.tensor_parallel = 1",
        )
    return {name: split.dims.get(id(parameter)) for name, parameter in model.named_parameters()}


def _divide_decoder(model: DecoderModel, split: MatmulSplit) -> None:
    kv_heads = model.config.kv_heads
    split.divide_embedding(model.embedding, scatters=True)
    split.gather_output(model.norm)
    for block in model.blocks:
        attention: Any = block.attention
        split.gather_output(block.attention_norm)
        split.divide_columns(attention.query)
        for projection in (attention.key, attention.value):
            split.divide_kv_projection(projection, kv_heads=kv_heads)
        split.divide_row(attention.output)
        feed_forward: Any = block.feed_forward
        if isinstance(feed_forward, Mixture):  # routes this rank's tokens, to whole experts
            feed_forward.router.share_sequences(split.ranks, tensor_group=split.group)
            feed_forward = feed_forward.shared
            if feed_forward is None:
                continue
            split.gather_input(feed_forward)
        else:
            split.gather_output(block.feed_forward_norm)
        for column in (feed_forward.gate, feed_forward.up):
            split.divide_columns(column)
        split.divide_row(feed_forward.down)
    split.divide_head(model.head)
