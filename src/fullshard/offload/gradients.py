"""Storage of reduced gradients until their update."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.offload.fsdp_params import dtensor_like, master_dtype
from fullshard.offload.host_memory import allocate_host_memory
from fullshard.torch_private.fsdp import shard_shape


class GradientStore(Protocol):
    """The gradients of sharded parameters, by name."""

    def find_gradient(self, name: str) -> Tensor | None:
        """Returns a parameter's gradient, placed like the parameter, or None if it has no gradient."""
        ...

    def clear(self) -> None:
        """Removes all gradients. Their tensors stay unchanged, since an update may still use them."""
        ...


class DeviceGradients:
    """Gradients that stay in `parameter.grad`, where FSDP2 puts them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def find_gradient(self, name: str) -> Tensor | None:
        return self._parameters[name].grad

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class HostGradients:
    """Gradients in host memory, in their masters' dtype, copied there as soon as FSDP2 has reduced them.

    Gradients of further microbatches are added on the device.

    engine: FSDP2's object of each parameter, by name
    pinned: registers the host memory with CUDA, and copies on a stream of its own
    """

    def __init__(self, engine: Mapping[str, Any], *, pinned: bool) -> None:
        sizes = [shard_shape(one).numel() * master_dtype(one).itemsize for one in engine.values()]
        *begins, total = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        memory = allocate_host_memory(total, pinned=pinned)
        self._engine, self._there = engine, set[str]()
        self._host = {
            name: memory[begin : begin + size].view(master_dtype(one))
            for (name, one), begin, size in zip(engine.items(), begins, sizes, strict=True)
        }
        self._stream = torch.cuda.Stream() if pinned else None
        for name, one in engine.items():
            take = cast(Callable[[Tensor], None], partial(self._move_gradient_to_host, name))
            one.sharded_param.register_post_accumulate_grad_hook(take)

    def find_gradient(self, name: str) -> Tensor | None:
        if name not in self._there:
            return None
        if self._stream is not None:
            self._stream.synchronize()
        return dtensor_like(self._engine[name], self._host[name])

    def clear(self) -> None:
        self._there.clear()

    @torch.no_grad()
    def _move_gradient_to_host(self, name: str, parameter: nn.Parameter) -> None:
        """Moves a gradient to host memory, or adds it there. FSDP2 calls this on the reducing stream."""
        assert isinstance(parameter.grad, DTensor), "the engine reduces sharded gradients"
        gradient, parameter.grad = parameter.grad.to_local(), None
        host, adds = self._host[name].view(gradient.shape), name in self._there
        self._there.add(name)
        if self._stream is None:
            host.add_(gradient) if adds else host.copy_(gradient)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if adds:
                gradient = host.to(gradient.device, non_blocking=True).add_(gradient)
            host.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
