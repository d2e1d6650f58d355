"""What the engine reads when it gathers a parameter whose state is elsewhere.

[Note: a shard that is elsewhere] `fully_shard` asks the local tensor of a shard for `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, its extension points, each time that it gathers. Here a plain tensor gets them as
attributes: the gather waits until the parameter is updated, and sends what it is given, in the dtype computed
in. The local tensor itself keeps shape, dtype and device of the master, so that reduced gradients arrive as
they are (a shard in bf16 would have them rounded), but may be one element that stands for all: NaN, so that
nobody takes it for the values (of integers the least).

What is kept sharded over fewer ranks after forward (`reshard_after_forward=<int>`) is gathered from there;
the engine has no extension point for that, so such parameters get a subclass of the engine's own.

`_get_fsdp_state`, `_fsdp_param_group`, `_sharded_param_data` and `_local_tensor` are the engine's own names,
the same in torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Source = Callable[[torch.dtype], Tensor]


def engine_parameters(module: FSDPModule) -> list[Any]:
    """The engine's objects of one unit's parameters, in the order in which it gathers them."""
    group = module._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
    return [] if group is None else list(group.fsdp_params)


def gathered_parameters(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Of each parameter that is sharded, in the order of use: the number of the unit that gathers it, its
    name, the engine's object."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
        for one in engine_parameters(module):
            yield unit, names[id(one.sharded_param)], one


def local_shape(engine_parameter: Any) -> torch.Size:
    """Of this rank's shard, without padding."""
    return engine_parameter.sharded_size


def padded_shape(engine_parameter: Any) -> torch.Size:
    """Of the shard as it is gathered."""
    return engine_parameter.padded_sharded_param_size


def shard_dtype(engine_parameter: Any) -> torch.dtype:
    """The dtype of the shard."""
    return engine_parameter.sharded_param.dtype


def compute_dtype(engine_parameter: Any) -> torch.dtype:
    """The dtype that the parameter is gathered in: integers are never cast."""
    kept = shard_dtype(engine_parameter)
    return (engine_parameter.mp_policy.param_dtype if kept.is_floating_point else None) or kept


def redirect_all_gather(engine_parameter: Any, source: Source, *, local: Tensor | None) -> None:
    """From now on the engine gathers what `source(dtype)` gives: this rank's shard as `padded_shape` has it,
    on the device, in that dtype. See [Note: a shard that is elsewhere].

    `local`: the master, of `own_shape`, to be seen as the shard; None: it is not on the shard's device.
    """
    parameter = cast(DTensor, engine_parameter.sharded_param)
    if local is None:
        one = _stand_in(parameter.dtype).to(parameter.device_mesh.device_type)
        local = one.expand(local_shape(engine_parameter))
    local = local.view(local_shape(engine_parameter))

    def before(
        mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:  # signature: the engine's
        return (source(compute_dtype(engine_parameter)),), None

    def after(  # signature: the engine's
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None

    if engine_parameter.post_forward_mesh_info not in (None, engine_parameter.mesh_info):
        engine_parameter.__class__ = _kept_over_fewer(type(engine_parameter))
    engine_parameter._sharded_param_data = local.reshape(-1)
    parameter._local_tensor = local  # pyright: ignore[reportPrivateUsage]
    local.fsdp_pre_all_gather = before  # pyright: ignore[reportAttributeAccessIssue]
    local.fsdp_post_all_gather = after  # pyright: ignore[reportAttributeAccessIssue]


def dtensor_like(engine_parameter: Any, local: Tensor) -> DTensor:
    """A DTensor placed as the parameter is, whose local part is `local`, wherever it lies. A deep copy of it,
    and what a file holds of it, is a DTensor of memory of its own: torch's are none of a tensor on a drive,
    and fail for a piece of a slab."""
    spec = engine_parameter.sharded_param._spec
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    changed = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    local = local.view(local_shape(engine_parameter))

    def copied() -> DTensor:
        return cast(Any, DTensor)(local.to("cpu", copy=True), changed, requires_grad=False)

    shard = cast(Any, DTensor)(local, changed, requires_grad=False)
    shard.__deepcopy__ = lambda _memo: copied()
    shard.__reduce_ex__ = lambda protocol: copied().__reduce_ex__(protocol)
    return shard


def _stand_in(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(float("nan")).to(dtype)
    return torch.tensor(dtype is not torch.bool and torch.iinfo(dtype).min, dtype=dtype)


@cache
def _kept_over_fewer(cls: type[Any]) -> type[Any]:
    """The engine's class, of parameters that may be gathered from what is left of them after forward."""

    class KeptOverFewer(cls):
        @property
        def all_gather_inputs(self) -> list[Tensor]:
            kept = getattr(self, "_sharded_post_forward_param_data", None)
            return super().all_gather_inputs if kept is None else [kept]

    return KeptOverFewer
