"""Private names of process groups."""

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.torch_private.names import require_names, torch_names

_C10D = "torch.distributed.distributed_c10d"
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_NATIVE = "torch._C._distributed_c10d"

NAMES = require_names(
    torch_names("torch.distributed.ProcessGroup._get_backend _device_types", "finds backends and devices"),
    torch_names(f"{_NATIVE}.Backend.Options._timeout", "gives groups the timeout of the default group"),
    torch_names(f"{_NATIVE}.Backend._get_sequence_number_for_group", "counts collectives", is_optional=True),
    torch_names(f"{_C10D}._resolve_process_group", "finds a group by its name, in a graph"),
    torch_names(f"{_C10D}._get_default_store", "exchanges what differs between ranks"),
    torch_names(f"{_NATIVE}.{' '.join(_RECORDERS)}", "reads the flight recorder", is_optional=True),
)


def has_backend(device: str, group: Any = None) -> bool:
    """Returns whether `group` (None: the default group) runs collectives on tensors of this device type."""
    group = group or dist.group.WORLD
    try:
        return group is not None and group._get_backend(torch.device(device)) is not None
    except RuntimeError:
        return False


def count_issued_collectives(device: torch.device) -> int:
    """Returns the number of collectives that this rank has issued on the default group.

    The backend for `device` counts them (gloo also counts point-to-point messages); 0 if it does not.
    """
    group: Any = dist.group.WORLD  # torch's stubs do not know the method of a backend
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except (AttributeError, NotImplementedError, RuntimeError):  # also without a default group
        return 0


def find_default_timeout() -> timedelta | None:
    """Returns how long a collective of the default group may take; None if its backends do not say."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def group_of_name(name: str) -> dist.ProcessGroup:
    """Returns the process group of this name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage]
    return resolve(name)


def find_default_store() -> dist.Store | None:
    """Returns the store of the default process group, or None if there is no default group."""
    find = dist.distributed_c10d._get_default_store  # pyright: ignore[reportPrivateUsage]
    return find() if dist.is_initialized() else None


def dump_flight_recorders() -> list[str]:
    """Returns what torch's recorders of collectives hold, each as JSON."""
    bindings = importlib.import_module(_NATIVE)
    return [getattr(bindings, name)() for name in _RECORDERS if hasattr(bindings, name)]
