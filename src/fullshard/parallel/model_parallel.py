"""Applies every division of a plan to a model: its sequences, its matmuls and its experts.

[Note: DTensors are storage]
Parameters are divided over the inner axis of a mesh (`tp`, `ep`) before FSDP2 shards them over the others.
Each is a DTensor on (`dp_replicate`, `dp_shard`, `tp`): checkpoints, norms and optimizers see its whole
shape, and which part of it this rank has. While a unit computes, FSDP2 would wrap what it gathers in a
DTensor over `tp`. Here modules get the local tensor instead, so that forward and backward run no DTensor
operation: their collectives are those of `fullshard.parallel.tensor_parallel`. Experts are the same on
(`dp_replicate`, `dp_mod_ep`, `ep`): see `fullshard.parallel.expert_parallel`.

[Note: the order of two splits]
The inner axis splits a parameter first, and `dp_shard` splits that part. If both split dim 0, the placement
over `dp_shard` is FSDP2's `_StridedShard`: for it `is_shard()` is False, and so are `is_shard(0)` and
`isinstance(placement, Shard)`. Ask `is_replicate()` instead. Each rank's part is still one box of the whole
tensor: see [Note: nested cuts] in `fullshard.spec.shard_layout`.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.distributed.sequence_parts import SequencePart
from fullshard.errors import ShardError, TrainError
from fullshard.models.adapted_parameters import iterate_parameter_wrappers
from fullshard.models.decoder import Attention, DecoderModel
from fullshard.models.document_attention import DECLARED, ContextParallel, set_document_attention_if_supported
from fullshard.models.experts import Router
from fullshard.models.huggingface import adds_balance_loss, is_causal_lm
from fullshard.models.loss import windows_by_layer_kind
from fullshard.parallel.expert_parallel import divide_experts_and_return_split_dims
from fullshard.parallel.mesh import split_inner_axis
from fullshard.parallel.model_parameters import replace_by_id
from fullshard.parallel.tensor_parallel import divide_matmuls_and_return_split_dims
from fullshard.parallel.units import Unit
from fullshard.quantities import join_names
from fullshard.spec.model import SharedAxis
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
                module.add_group_that_shares_sequences(context.part.ranks, context_group=group)
        return
    _check_only_attention_mixes_tokens(model)
    config: Any = cast(Any, model.config).get_text_config()
    if not set_document_attention_if_supported(model, context=context):
        kind = str(getattr(model.config, "_attn_implementation", "eager"))
        if getattr(config, "attn_logit_softcapping", None) is not None:
            why = "it caps the logits of attention, which only its own attention on one rank does"
            raise _sequence_error(model, why=why)
        if kind != "sdpa" and all(getattr(model, one, False) for one in DECLARED):
            why = f'it computes attention as "{kind}", and only "sdpa" can be replaced'
            raise _sequence_error(
                model, why=why, fix='model.attention = "sdpa", or sharding.context_parallel = 1'
            )
        raise _sequence_error(model, why="transformers lets no other code replace its attention")


def _check_only_attention_mixes_tokens(model: nn.Module) -> None:
    """Raises ShardError unless `model` is a causal language model whose only layers over tokens attend."""
    if not is_causal_lm(model):
        raise _sequence_error(model, why="its attention is not that of a causal language model")
    if adds_balance_loss(model):
        raise _sequence_error(
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
        raise _sequence_error(model, why=f"recurrent and convolutional layers read tokens in order: {layer}")
    try:
        windows_by_layer_kind(cast(Any, model.config).get_text_config())
    except TrainError as error:
        raise _sequence_error(model, why=error.what) from error


def _sequence_error(model: nn.Module, *, why: str, fix: str = "sharding.context_parallel = 1") -> ShardError:
    return ShardError(
        f"the sequences of {type(model).__name__} cannot be divided over ranks.",
        got="sharding.context_parallel above 1",
        why=why,
        fix=fix,
    )


SplitDims = Mapping[str, int | None]
"""Parameter name -> the dim that the inner axis splits, or None if each of its ranks has all of it."""


def divide_model_and_return_split_dims(
    model: nn.Module, plan: Plan, *, rank: int, group_name: Callable[[SharedAxis], str]
) -> dict[str, int | None]:
    """Makes `model` compute as global rank `rank` of `plan` does. Returns the divided dims of its parameters.

    The dims are keyed by parameter name; the parameters themselves are divided when the model is sharded. An
    empty result means that none are.

    group_name: returns the name of this rank's process group of an axis; all ranks call it for the same axes
        in the same order

    Raises ShardError and PlanError as `use_context_parallel`, `divide_matmuls_and_return_split_dims` and
    `divide_experts_and_return_split_dims` do.
    """
    dims = dict[str, int | None]()
    wrapped = [name for name, _ in iterate_parameter_wrappers(model)]
    if wrapped and (plan.tensor_parallel > 1 or plan.expert_parallel > 1):
        raise ShardError(
            "adapters of parameters, such as stacked experts, cannot be divided over ranks.",
            got=f"adapters of {join_names(wrapped)}, sharding.tensor_parallel = {plan.tensor_parallel}, "
            f"sharding.expert_parallel = {plan.expert_parallel}",
            why="neighbouring columns of peft's B belong to different experts",
            fix="both 1, or other adapter.targets",
        )
    if plan.context_parallel > 1:
        use_context_parallel(model, plan, rank=rank, group=group_name("context"))
    if plan.tensor_parallel > 1:
        dims |= divide_matmuls_and_return_split_dims(model, plan, rank=rank, group=group_name("tensor"))
    if plan.has_expert_mesh:
        dims |= divide_experts_and_return_split_dims(
            model, plan, group=group_name("expert") if plan.expert_parallel > 1 else ""
        )
    return dims


def split_over_inner_axis(model: nn.Module, unit: Unit, *, split: SplitDims, mesh: DeviceMesh) -> None:
    """Replaces the parameters of `unit`, which are on the meta device, by DTensors over the inner axis."""
    _, axis = split_inner_axis(mesh)
    assert axis is not None, "only meshes with an inner axis split parameters"
    made: dict[int, nn.Parameter] = {}
    for name, parameter in unit.parameters.items():
        dim = split[name]
        local = parameter.detach()
        if dim is not None:
            chunks, place = local.chunk(axis.size(), dim), axis.get_local_rank()
            local = chunks[place] if place < len(chunks) else local.narrow(dim, 0, 0)
        data = DTensor.from_local(
            torch.empty_like(local, memory_format=torch.contiguous_format),
            axis,
            [Replicate() if dim is None else Shard(dim)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        unit.parameters[name] = made[id(parameter)]
    replace_by_id(model, made)
