"""Access to FSDP2's parameters, and redirection of their all-gathers when their state is offloaded.

[Note: a shard that is elsewhere] In each all-gather, `fully_shard` looks up its extension points
`fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a shard. Here a plain tensor gets them
as attributes: the all-gather waits until the parameter is updated, and sends the offloaded shard in the
compute dtype.

The local tensor keeps the master's shape, dtype and device, so that reduced gradients arrive unchanged (for a
bf16 shard, FSDP2 would round them). It may be one element expanded to the shape: NaN, or the least integer,
so that it is never mistaken for the values.

Parameters that are sharded over fewer ranks after forward (`reshard_after_forward=<int>`) are gathered from
the shard kept after forward. FSDP2 has no extension point for this, so they get a subclass of FSDP2's class.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.torch_private.fsdp import compute_dtype, engine_parameters, replace_shard, shard_shape
from fullshard.torch_private.tensors import dtensor_with_placements_of

Source = Callable[[torch.dtype], Tensor]


def iterate_sharded_parameters(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Yields (unit number, name, FSDP2's object) of each sharded parameter, in the order of use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
        for one in engine_parameters(module):
            yield unit, names[id(one.sharded_param)], one


def master_dtype(engine_parameter: Any) -> torch.dtype:
    return engine_parameter.sharded_param.dtype


def redirect_all_gather(engine_parameter: Any, source: Source, *, local: Tensor | None) -> None:
    """Makes FSDP2 gather the result of `source`, not its own shard: see [Note: a shard that is elsewhere].

    source: called with the compute dtype; returns this rank's padded shard in it, on the device
    local: the fp32 master, which becomes the parameter's local tensor; None if it is not on the same device
    """
    parameter = cast(DTensor, engine_parameter.sharded_param)
    if local is None:
        one = _invalid_placeholder_value(parameter.dtype).to(parameter.device_mesh.device_type)
        local = one.expand(shard_shape(engine_parameter))
    local = local.view(shard_shape(engine_parameter))

    def pre_all_gather(
        mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:  # signature: FSDP2's
        return (source(compute_dtype(engine_parameter)),), None

    def post_all_gather(  # signature: FSDP2's
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None

    replace_shard(engine_parameter, local)
    local.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    local.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]


def dtensor_like(engine_parameter: Any, local: Tensor) -> DTensor:
    """Returns a DTensor placed like the parameter, whose local part is `local`, on any device or a drive.

    Its deep copy or pickle is a DTensor with memory of its own. Torch's own deep copy would hold no data for
    a tensor on a drive, and fail for a view into a larger tensor.
    """
    local = local.view(shard_shape(engine_parameter))
    like = engine_parameter.sharded_param

    def copy_to_cpu() -> DTensor:
        return dtensor_with_placements_of(like, local.to("cpu", copy=True))

    shard: Any = dtensor_with_placements_of(like, local)
    shard.__deepcopy__ = lambda _memo: copy_to_cpu()
    shard.__reduce_ex__ = lambda protocol: copy_to_cpu().__reduce_ex__(protocol)
    return shard


def _invalid_placeholder_value(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(float("nan")).to(dtype)
    return torch.tensor(dtype is not torch.bool and torch.iinfo(dtype).min, dtype=dtype)
