"""Private names of torch's tensors, DTensors, modules, profiles and trees of tensors.

Trees: `torch.utils._pytree` has no public twin in torch 2.11 to 2.15.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.checkpoint import utils as dcp_utils
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from fullshard.torch_private.names import require_names, torch_names

NAMES = require_names(
    torch_names(
        "torch.utils._pytree.TreeSpec tree_flatten tree_leaves tree_map_only tree_unflatten",
        "finds the tensors in arguments and batches",
    ),
    torch_names("torch._foreach_norm", "computes norms of gradients"),
    torch_names("torch._foreach_mul_", "scales gradients"),
    torch_names("torch._foreach_add_", "counts steps on the device"),
    torch_names("torch._foreach_lerp_", "averages parameters"),
    torch_names("torch._fused_adamw_", "updates offloaded state"),
    torch_names("torch.UntypedStorage._cdata", "identifies memory"),
    torch_names("torch.Tensor._version", "sees that a saved activation was overwritten"),
    torch_names(
        "torch._C._autograd._top_saved_tensors_default_hooks", "sees that activations are recomputed or moved"
    ),
    torch_names("torch.Tensor._base", "finds the tensor of a view"),
    torch_names("torch.Tensor._backward_hooks", "finds hooks of parameters"),
    torch_names("torch.Tensor._post_accumulate_grad_hooks", "finds hooks of parameters"),
    torch_names(
        "torch.optim.Optimizer._optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "finds hooks of optimizers",
        is_optional=True,
    ),
    torch_names("torch.nn.Module._parameters _buffers _modules", "replaces parameters, buffers and modules"),
    torch_names("torch.nn.Module._non_persistent_buffers_set", "leaves buffers out of checkpoints"),
    torch_names("torch.nn.utils.parametrize._cache", "computes parametrized weights once"),
    torch_names("torch.nn.modules.batchnorm._BatchNorm", "finds modules that mix rows"),
    torch_names("torch._C._accelerator_setAllocatorSettings", "lets segments grow"),
    torch_names(
        "torch._C._autograd._ProfilerResult.experimental_event_tree", "reads allocations of a profile"
    ),
    torch_names("torch.distributed.checkpoint.filesystem._StorageInfo", "writes checkpoints that DCP reads"),
    torch_names("torch.distributed.checkpoint.utils._create_file_view", "reads parts of files of DCP"),
    torch_names("torch.distributed.tensor.DTensor._local_tensor", "replaces the part that a rank has"),
    torch_names("torch.distributed.tensor.DTensor._spec", "makes a DTensor whose part is on another device"),
)

BatchNorm: Any = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
"""The common class of the modules that normalise over a batch."""


def foreach_norm(
    tensors: Sequence[Tensor], order: float, *, dtype: torch.dtype | None = None
) -> Sequence[Tensor]:
    """Returns the norm of each tensor."""
    return torch._foreach_norm(list(tensors), order, dtype)  # pyright: ignore[reportPrivateUsage]


def foreach_multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each tensor by `factor` in place, without rounding the factor to the tensors' dtype."""
    torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateUsage]


def foreach_add(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Adds each of `others` to its tensor in place. Torch reads a single tensor for all on the host."""
    torch._foreach_add_(list(tensors), list(others))  # pyright: ignore[reportPrivateUsage]


def foreach_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], *, weight: float) -> None:
    """Moves each tensor towards its end in place, by the fraction `weight` of the difference."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)  # pyright: ignore[reportPrivateUsage]


def fused_adamw(*tensors: Any, **options: Any) -> None:  # signature: torch's
    """Runs torch's fused update of AdamW."""
    torch._fused_adamw_(*tensors, **options)  # pyright: ignore[reportPrivateUsage]


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns a number that identifies a storage, real or fake, among all live ones."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def version(tensor: Tensor) -> int:
    """Returns the number of times that the memory of `tensor` was changed in place."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def base(tensor: Tensor) -> Tensor | None:
    """Returns the tensor of which `tensor` is a view, or None."""
    return tensor._base  # pyright: ignore[reportPrivateUsage]


def gradient_hooks(tensor: Tensor) -> list[Any]:
    """Returns the functions that `register_hook` has registered."""
    return list((tensor._backward_hooks or {}).values())  # pyright: ignore[reportPrivateUsage]


def post_accumulate_hooks(tensor: Tensor) -> list[Any]:
    """Returns the functions that `register_post_accumulate_grad_hook` has registered."""
    hooks = tensor._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage]
    return list((hooks or {}).values())


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the functions that `register_step_pre_hook` and `register_step_post_hook` registered."""
    kinds = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return [hook for hooks in kinds for hook in hooks.values()]


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks receive the tensors that autograd saves now, as in a recomputed block."""
    private: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return private._autograd._top_saved_tensors_default_hooks(True) is not None


def registered_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own dict of parameters. Setting an item calls no setter of the module."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own dict of buffers."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def registered_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's own dict of children."""
    return module._modules  # pyright: ignore[reportPrivateUsage]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Returns the names of the module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


def parametrization_cache() -> dict[tuple[int, str], Tensor | None]:
    """Returns the weights that `parametrize.cached()` has kept, by (id of the module, name)."""
    return parametrize._cache  # pyright: ignore[reportPrivateUsage]


def make_dcp_storage_info(filesystem: Any, name: str, *, offset: int, length: int) -> Any:
    """Returns DCP's record of a piece of a file. `filesystem`: `torch.distributed.checkpoint.filesystem`."""
    return filesystem._StorageInfo(name, offset, length)


def dcp_file_view(file: Any, *, begin: int, length: int) -> Any:
    """Returns a part of an opened file, as a file."""
    return dcp_utils._create_file_view(file, begin, length)  # pyright: ignore[reportPrivateUsage]


def set_allocator_settings(settings: str) -> None:
    """Sets the CUDA allocator's settings, as in its environment variable."""
    torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportPrivateUsage]


def profile_event_tree(profiler: profile) -> list[Any]:
    """Returns the outermost events of a profile that has ended; those inside are their `children`."""
    assert profiler.kineto_results is not None, "the profiler has ended"
    return profiler.kineto_results.experimental_event_tree()


def local_part(tensor: DTensor) -> Tensor:
    """Returns this rank's part itself. `to_local` makes a view of it, and takes longer."""
    return tensor._local_tensor  # pyright: ignore[reportPrivateUsage]


def set_local_part(tensor: DTensor, local: Tensor) -> None:
    """Replaces this rank's part."""
    tensor._local_tensor = local  # pyright: ignore[reportPrivateUsage]


def dtensor_with_placements_of(like: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor with the shape, mesh and placements of `like`, whose part here is `local`.

    Unlike `DTensor.from_local`, it accepts a part on another device than the mesh's.
    """
    spec: Any = like._spec  # pyright: ignore[reportPrivateUsage]
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    changed = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return cast(Any, DTensor)(local, changed, requires_grad=False)
