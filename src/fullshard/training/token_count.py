"""The number of tokens that a model computes of a microbatch, in the unit of the plan."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fullshard.spec.plan import Plan
from fullshard.torch_private.tensors import tree_leaves


def count_computed_tokens(batch: Any, plan: Plan) -> int:
    """Returns the tokens of a microbatch, including padding and those whose label does not count.

    These are the elements of `tokens` or `input_ids`, or of the first tensor of a tuple if it is (rows,
    length) integers. Each row of any other batch counts as `data.sequence_length` tokens, as in the plan. So
    does each row if that is 1, which is for samples that are not sequences.

    The number of rows is the plan's if a tensor has as many, or else that of the first tensor. A batch
    without tensors counts as one of the plan.
    """
    length, values = plan.run.data.sequence_length, dict(batch) if isinstance(batch, Mapping) else batch
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim]
    if isinstance(values, dict):
        ids = values.get("tokens", values.get("input_ids"))
    else:
        ids = next((one for one in tensors[:1] if one.ndim == 2 and not one.is_floating_point()), None)
    if isinstance(ids, Tensor) and length > 1:
        return ids.numel()
    rows = [one.shape[0] for one in tensors]
    return length * (plan.microbatch if plan.microbatch in rows or not rows else rows[0])
