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

`_get_fsdp_state`, `_fsdp_param_group`, `_sharded_param_data` and `_local_tensor` are private names of FSDP2,
unchanged from torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Source = Callable[[torch.dtype], Tensor]


def iterate_sharded_parameters(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Yields (unit number, name, FSDP2's object) of each sharded parameter, in the order of use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
        group = module._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
        for one in () if group is None else group.fsdp_params:
            yield unit, names[id(one.sharded_param)], one


def local_shard_shape(engine_parameter: Any) -> torch.Size:
    return engine_parameter.sharded_size


def padded_shard_shape(engine_parameter: Any) -> torch.Size:
    """Returns the shape of this rank's shard with the padding that the all-gather sends."""
    return engine_parameter.padded_sharded_param_size


def master_dtype(engine_parameter: Any) -> torch.dtype:
    return engine_parameter.sharded_param.dtype


def compute_dtype(engine_parameter: Any) -> torch.dtype:
    """Returns the dtype in which the parameter is gathered. Integers are never cast."""
    kept = master_dtype(engine_parameter)
    return (engine_parameter.mp_policy.param_dtype if kept.is_floating_point else None) or kept


def redirect_all_gather(engine_parameter: Any, source: Source, *, local: Tensor | None) -> None:
    """Makes FSDP2 gather the result of `source`, not its own shard: see [Note: a shard that is elsewhere].

    source: called with the compute dtype; returns this rank's padded shard in it, on the device
    local: the fp32 master, which becomes the parameter's local tensor; None if it is not on the same device
    """
    parameter = cast(DTensor, engine_parameter.sharded_param)
    if local is None:
        one = _invalid_placeholder_value(parameter.dtype).to(parameter.device_mesh.device_type)
        local = one.expand(local_shard_shape(engine_parameter))
    local = local.view(local_shard_shape(engine_parameter))

    def pre_all_gather(
        mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:  # signature: FSDP2's
        return (source(compute_dtype(engine_parameter)),), None

    def post_all_gather(  # signature: FSDP2's
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None

    if engine_parameter.post_forward_mesh_info not in (None, engine_parameter.mesh_info):
        engine_parameter.__class__ = _post_forward_fsdp_param_class(type(engine_parameter))
    engine_parameter._sharded_param_data = local.reshape(-1)
    parameter._local_tensor = local  # pyright: ignore[reportPrivateUsage]
    local.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    local.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]


def dtensor_like(engine_parameter: Any, local: Tensor) -> DTensor:
    """Returns a DTensor placed like the parameter, whose local part is `local`, on any device or a drive.

    Its deep copy or pickle is a DTensor with memory of its own. Torch's own deep copy would hold no data for
    a tensor on a drive, and fail for a view into a larger tensor.
    """
    spec = engine_parameter.sharded_param._spec
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    changed = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    local = local.view(local_shard_shape(engine_parameter))

    def copy_to_cpu() -> DTensor:
        return cast(Any, DTensor)(local.to("cpu", copy=True), changed, requires_grad=False)

    shard = cast(Any, DTensor)(local, changed, requires_grad=False)
    shard.__deepcopy__ = lambda _memo: copy_to_cpu()
    shard.__reduce_ex__ = lambda protocol: copy_to_cpu().__reduce_ex__(protocol)
    return shard


def _invalid_placeholder_value(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(float("nan")).to(dtype)
    return torch.tensor(dtype is not torch.bool and torch.iinfo(dtype).min, dtype=dtype)


@cache
def _post_forward_fsdp_param_class(cls: type[Any]) -> type[Any]:
    """Returns a subclass of FSDP2's class that gathers from the shard kept after forward, if there is one."""

    class PostForwardFSDPParam(cls):
        @property
        def all_gather_inputs(self) -> list[Tensor]:
            kept = getattr(self, "_sharded_post_forward_param_data", None)
            return super().all_gather_inputs if kept is None else [kept]

    return PostForwardFSDPParam
