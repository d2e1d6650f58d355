"""Operations on gradients between backward and update: norms, scaling, and averaging of scalars."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.distributed.agreement import world_size
from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.tensors import local_tensor
from fullshard.offload.adamw import StreamingAdamW
from fullshard.sharding.mesh import TENSOR_AXIS

_ALONE_BYTES = 1 << 20  # gradients that are summed in place; a copy of smaller ones takes little memory


def list_gradients(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the gradients of `parameters` that have one, including those of offloaded parameters."""
    if not isinstance(optimizer, StreamingAdamW):
        return [p.grad for p in parameters if p.grad is not None]
    names, outside = optimizer.offloaded.names_of, optimizer.gradients
    every = (outside.find_gradient(names[p]) if p in names else p.grad for p in parameters)
    return [gradient for gradient in every if gradient is not None]


def clear_gradients(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Clears the gradients of `parameters`, and those of offloaded parameters."""
    for parameter in parameters:
        parameter.grad = None
    if isinstance(optimizer, StreamingAdamW):
        optimizer.gradients.clear()


@torch.no_grad()
def average_scalar_gradients(gradients: Sequence[Tensor]) -> None:
    """Averages the gradients of scalar parameters over ranks in place, because FSDP2 does not shard these."""
    scalars = [g for g in gradients if g.ndim == 0]
    if not scalars or world_size() == 1:
        return
    flat = torch.stack(scalars)
    with TimedRange("all_reduce"):
        dist.all_reduce(flat)
    for scalar, total in zip(scalars, flat.unbind(), strict=True):
        scalar.copy_(total / world_size())


@torch.no_grad()
def sum_gradients_over_tensor_axis(gradients: Sequence[Tensor]) -> None:
    """Sums the gradients of parameters that all ranks of the `tp` axis have whole. In place.

    Each of these ranks computes with them for its own tokens or heads alone. Small ones share one all-reduce
    per dtype.
    """
    groups = defaultdict[tuple[torch.dtype, dist.ProcessGroup], list[Tensor]](list)
    for gradient in gradients:
        if not isinstance(gradient, DTensor) or TENSOR_AXIS not in (
            gradient.device_mesh.mesh_dim_names or ()
        ):
            continue
        if gradient.placements[-1].is_replicate():  # `tp` is the last axis
            part, group = gradient.to_local(), gradient.device_mesh.get_group(TENSOR_AXIS)
            if part.nbytes >= _ALONE_BYTES and part.is_contiguous():
                dist.all_reduce(part, group=group)
            else:
                groups[part.dtype, group].append(part)
    for (_, group), parts in groups.items():
        flat = torch.cat([part.flatten() for part in parts])
        with TimedRange("all_reduce"):
            dist.all_reduce(flat, group=group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


@torch.no_grad()
def local_gradient_norms(gradients: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Returns the L2 norm of this rank's part of each gradient, in fp32 even for bf16 gradients."""
    if not gradients:
        return {}
    local = [local_tensor(gradient) for gradient in gradients]
    norms = torch._foreach_norm(local, 2, torch.float32)  # pyright: ignore[reportPrivateUsage]
    return dict(zip(gradients, norms, strict=True))


@torch.no_grad()
def local_share_of_squared_norm(norms: Mapping[Tensor, Tensor]) -> Tensor:
    """Returns this rank's share of the squared global norm, which is the sum of all ranks' shares.

    norms: L2 norm of this rank's part of each gradient, keyed by the gradient or its parameter; at least one
    """
    by_replicas, ranks = defaultdict[int, list[Tensor]](list), world_size()
    for tensor, norm in norms.items():
        parts = _count_parts(tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else 1
        by_replicas[ranks // parts].append(norm)
    shares = [torch.stack(own).double().square().sum() / count for count, own in by_replicas.items()]
    return torch.stack(shares).sum()


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies this rank's part of each gradient by `factor` in place."""
    if gradients and factor != 1.0:
        local = [local_tensor(gradient) for gradient in gradients]
        torch._foreach_mul_(local, factor)  # pyright: ignore[reportPrivateUsage]


@lru_cache(maxsize=64)  # a step asks for each parameter
def _count_parts(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    # See [Note: the order of two splits] in `fullshard.sharding.split_parameters`.
    sharding_axes = (axis for axis, placement in enumerate(placements) if not placement.is_replicate())
    return math.prod(map(mesh.size, sharding_axes))
