"""Models whose attention can reach the keys of other ranks (context parallel), and those that are refused."""

from typing import Any, cast

from torch import nn

from fullshard.distributed.sequence_parts import SequencePart
from fullshard.errors import ShardError, TrainError
from fullshard.models.decoder import Attention, DecoderModel
from fullshard.models.document_attention import DECLARED, ContextParallel, use_document_attention
from fullshard.models.experts import Router
from fullshard.models.huggingface import has_balance_loss, is_causal_lm
from fullshard.models.token_arguments import windows_by_layer_kind
from fullshard.spec.plan import Plan


def use_context_parallel(model: nn.Module, plan: Plan, *, rank: int, group: str = "") -> None:
    """Makes the attention of `model` reach the keys of other ranks, if the plan divides sequences over ranks.

    Its batches are then the parts of sequences that global rank `rank` has.

    group: name of the process group of the ranks that share a sequence; fake tensors need none

    `model` is the reference decoder, or a causal language model of transformers whose attention is
    exchangeable. Raises ShardError for any other, and for models with recurrent or convolutional layers,
    which read tokens in order.
    """
    if plan.context_parallel == 1:
        return
    context = ContextParallel(SequencePart.from_plan(plan, rank), group)
    if isinstance(model, DecoderModel):
        for module in model.modules():
            if isinstance(module, Attention):
                module.context = context
            elif isinstance(module, Router):
                module.share_sequences(context.part.ranks, context_group=group)
        return
    _check_transformers_model(model)
    config: Any = cast(Any, model.config).get_text_config()
    if not use_document_attention(model, context=context):
        kind = str(getattr(model.config, "_attn_implementation", "eager"))
        if getattr(config, "attn_logit_softcapping", None) is not None:
            why = "it caps the logits of attention, which only its own attention on one rank does"
            raise _unsupported_error(model, why=why)
        if kind != "sdpa" and all(getattr(model, one, False) for one in DECLARED):
            why = f'it computes attention as "{kind}", and only "sdpa" can be replaced'
            raise _unsupported_error(
                model, why=why, fix='model.attention = "sdpa", or sharding.context_parallel = 1'
            )
        raise _unsupported_error(model, why="transformers lets no other code replace its attention")


def _check_transformers_model(model: nn.Module) -> None:
    """Raises ShardError unless `model` is a causal language model whose only layers over tokens attend."""
    if not is_causal_lm(model):
        raise _unsupported_error(model, why="its attention is not that of a causal language model")
    if has_balance_loss(model):
        raise _unsupported_error(
            model,
            why="its balance loss (output_router_logits) is one of all tokens, of which each rank has a part",
            fix="model.options.output_router_logits = false, or sharding.context_parallel = 1",
        )
    reads_in_order = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
    ]
    if reads_in_order or getattr(model, "_is_stateful", False):
        layer = reads_in_order[0] if reads_in_order else "its layers keep a state"
        raise _unsupported_error(
            model, why=f"recurrent and convolutional layers read tokens in order: {layer}"
        )
    try:
        windows_by_layer_kind(cast(Any, model.config).get_text_config())
    except TrainError as error:
        raise _unsupported_error(model, why=error.what) from error


def _unsupported_error(
    model: nn.Module, *, why: str, fix: str = "sharding.context_parallel = 1"
) -> ShardError:
    return ShardError(
        f"the sequences of {type(model).__name__} cannot be divided over ranks.",
        got="sharding.context_parallel above 1",
        why=why,
        fix=fix,
    )
