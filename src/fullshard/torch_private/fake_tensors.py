"""Private names of fake tensors, dispatch modes and tensor subclasses."""

from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
)

from fullshard.torch_private.names import require_names, torch_names

NAMES = require_names(
    torch_names(
        "torch._subclasses.fake_tensor.FakeTensor FakeTensorMode unset_fake_temporarily "
        "DataDependentOutputException DynamicOutputShapeException",
        "traces a model without values",
    ),
    torch_names(
        "torch.utils._python_dispatch.TorchDispatchMode _disable_current_modes "
        "is_traceable_wrapper_subclass is_traceable_wrapper_subclass_type",
        "sees each operation, and the data of a tensor subclass",
    ),
    torch_names("torch._C.DisableTorchFunctionSubclass", "reads the shape of logits that are not computed"),
    torch_names("torch.Tensor._make_wrapper_subclass", "makes tensors that are computed or read later"),
    torch_names("torch._ops.OpOverload._schema", "finds the arguments that an operation writes to"),
    torch_names("torch._ops.OpOverload._uncache_dispatch", "replaces kernels while it traces"),
    torch_names("torch.library.Library._destroy", "replaces kernels while it traces"),
)

disable_current_modes = _disable_current_modes
"""Context in which no dispatch mode is active."""


def make_wrapper_subclass(cls: Any, shape: Any, **options: Any) -> Any:  # signature: torch's
    """Returns a tensor of the subclass `cls` that has a shape, a dtype and a device, and no memory."""
    return cast(Any, Tensor)._make_wrapper_subclass(cls, shape, **options)


def schema(operation: Any) -> Any:
    """Returns the schema of an operation: its arguments, and which of them it writes to."""
    return operation._schema


def forget_dispatch(operation: Any) -> None:
    """Makes torch look up the CPU's autograd kernel of an operation again, which tracers remember."""
    operation._uncache_dispatch(torch._C.DispatchKey.AutogradCPU)  # pyright: ignore[reportPrivateUsage]


def unregister(library: torch.library.Library) -> None:
    """Removes the kernels that a library has registered."""
    library._destroy()  # pyright: ignore[reportPrivateUsage]
