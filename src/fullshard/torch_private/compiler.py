"""Private names of torch's compiler. Importing this module imports Dynamo, which takes a second."""

from typing import Any

import torch._dynamo
import torch._functorch.config

from fullshard.torch_private.names import require_names, torch_names

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
)

dynamo: Any = torch._dynamo
"""`torch._dynamo`."""
functorch_config: Any = torch._functorch.config
"""`torch._functorch.config`."""
