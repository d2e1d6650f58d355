"""Balance of experts without a loss: a bias for the choice of experts, changed after each step.

Auxiliary-loss-free load balancing: arXiv:2408.15664, and arXiv:2412.19437, section 2.1.2.
"""

import torch
import torch.distributed as dist
from torch import nn

from fullshard.distributed.agreement import world_size
from fullshard.models.experts import Router


@torch.no_grad()
def balance_experts(model: nn.Module, *, rate: float) -> None:
    """Raises the bias of experts with fewer tokens than the mean by `rate`, and lowers it for the others.

    Tokens are those of all ranks since the last call. Collective. Does nothing for a model without biases.
    """
    routers = [one for one in model.modules() if isinstance(one, Router) and one.has_bias]
    if not routers:
        return
    tokens = torch.stack([router.tokens for router in routers])  # (layers, experts)
    if world_size() > 1:
        dist.all_reduce(tokens)
    change = rate * (tokens.mean(dim=1, keepdim=True) - tokens).sign()
    for router, own in zip(routers, change, strict=True):
        router.balance_bias.add_(own)
        router.tokens.zero_()
