"""Modules whose parameters are the stacked weights of experts."""

from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Returns whether `module` is the experts of a layer. See [Note: the seam of experts] in `experts`.

    All of its parameters have the expert as dim 0: those of this rank, or of all ranks that divide them.
    Modules of transformers have `is_transposed` from the decorator that makes their forward exchangeable;
    other modules have `takes_any_experts`.
    """
    count = getattr(module, "num_experts", None)
    has_seam = hasattr(module, "is_transposed") or hasattr(module, "takes_any_experts")
    if not (has_seam and isinstance(count, int)):
        return False
    parameters = list(module.parameters())
    return bool(parameters) and all(p.ndim > 1 and p.shape[0] % count == 0 for p in parameters)
