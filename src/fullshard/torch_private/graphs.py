"""Private names of torch's graphs of a program: AOTAutograd, and the decompositions of Inductor."""

from typing import Any

from torch._functorch.aot_autograd import aot_function as aot_function
from torch._functorch.partitioners import (
    min_cut_rematerialization_partition as min_cut_rematerialization_partition,
)
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]

from fullshard.torch_private.names import require_names, torch_names

_GRAPHS = "traces compiled blocks without values"

NAMES = require_names(
    torch_names("torch._functorch.aot_autograd.aot_function", _GRAPHS),
    torch_names("torch._functorch.partitioners.min_cut_rematerialization_partition", _GRAPHS),
    torch_names("torch._guards.detect_fake_mode", _GRAPHS),
    torch_names("torch._inductor.decomposition.select_decomp_table", _GRAPHS),
    torch_names("torch.nn.utils.stateless._reparametrize_module", _GRAPHS),
)

reparametrize_module = _reparametrize_module
"""Context in which a module computes with other parameters and buffers."""


def mark_as_emptying_its_arguments(program: Any) -> None:
    """Marks a program of a graph as one that takes a list of arguments and empties it, to free them early."""
    program._boxed_call = True
