"""Finds the matrices of a model's repeated blocks that Muon or SOAP updates by default."""

import re

from torch import nn

from fullshard.distributed.tensors import is_experts, is_router
from fullshard.models.adapters import has_transposed_weight
from fullshard.parallel.blocks import find_repeated_blocks

_FUSED = re.compile(r"qkv|c_attn|query_key_value|in_proj|gate_up|W_pack", re.IGNORECASE)


def find_hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained weights of linear modules and stacks of experts in repeated blocks, by name.

    Left out are embeddings, a head and all else outside of blocks, weights tied to an embedding, routers,
    convolutions, and the matrices A and B of adapters.

    >>> list(find_hidden_matrices(fs.DecoderModel(run.decoder_config)))[:2]
    ['blocks.0.attention.query.weight', 'blocks.0.attention.key.weight']
    """
    modules = dict(model.named_modules())
    tied = {id(one.weight) for one in modules.values() if isinstance(one, nn.Embedding)}
    found: dict[str, nn.Parameter] = {}
    for block in find_repeated_blocks(model):
        for path, module in modules.items():
            if f"{path}.".startswith(f"{block}.") and "lora_" not in path:
                for name, parameter in _matrices_of(module, modules[path.rpartition(".")[0]]).items():
                    if parameter.requires_grad and id(parameter) not in tied:
                        found[f"{path}.{name}"] = parameter
    first = {id(one): name for name, one in model.named_parameters()}  # the name in checkpoints
    return {first[id(one)]: one for one in found.values()}


def find_fused_matrices(names: list[str]) -> list[str]:
    """Returns those of the names that read like several matrices in one, such as gate and up."""
    return [name for name in names if _FUSED.search(name)]


def _matrices_of(module: nn.Module, parent: nn.Module) -> dict[str, nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if is_experts(module):
        return {name: one for name, one in own.items() if one.ndim == 3}
    if isinstance(module, nn.MultiheadAttention):
        return {name: one for name, one in own.items() if one.ndim == 2 and name.endswith("proj_weight")}
    is_linear = isinstance(module, nn.Linear) or has_transposed_weight(module)
    if not is_linear or own["weight"].ndim != 2:
        return {}
    return {} if is_router(module, parent) else {"weight": own["weight"]}
