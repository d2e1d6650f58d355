"""Private names of torch's compiler. Importing this module imports the compiler, which takes a second."""

from typing import Any

import torch._dynamo
import torch._functorch.config
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
    torch_names(
        "torch._dynamo.config.recompile_limit accumulated_recompile_limit", "compiles blocks that differ"
    ),
    torch_names(
        "torch._dynamo.exc.TorchDynamoException FailOnRecompileLimitHit", "runs eagerly what does not compile"
    ),
    torch_names("torch._dynamo.callback.callback_handler", "counts recompilations"),
    torch_names("torch._dynamo.utils.counters get_compilation_metrics", "counts graphs and breaks"),
    torch_names("torch._dynamo.explain", "checks that a block is one graph"),
    torch_names("torch._functorch.config.force_non_lazy_backward_lowering", "compiles backward with forward"),
    torch_names("torch._functorch.aot_autograd.aot_function", _GRAPHS),
    torch_names("torch._functorch.partitioners.min_cut_rematerialization_partition", _GRAPHS),
    torch_names("torch._guards.detect_fake_mode", _GRAPHS),
    torch_names("torch._inductor.decomposition.select_decomp_table", _GRAPHS),
    torch_names("torch.nn.utils.stateless._reparametrize_module", _GRAPHS),
)

dynamo: Any = torch._dynamo
"""`torch._dynamo`."""
functorch_config: Any = torch._functorch.config
"""`torch._functorch.config`."""
reparametrize_module = _reparametrize_module
"""Context in which a module computes with other parameters and buffers."""


def mark_as_emptying_its_arguments(program: Any) -> None:
    """Marks a program of a graph as one that takes a list of arguments and empties it, to free them early."""
    program._boxed_call = True
