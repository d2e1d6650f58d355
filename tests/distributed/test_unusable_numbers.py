"""Which numbers no training can continue from, by the role of their tensor."""

import math

import pytest
import torch

from fullshard.distributed.tensors import TRAINED, find_unusable_number

NUMBERS = (math.nan, math.inf, -math.inf, 1e29, -1e29, 1.9e19, -1.8e19, 1e-30, -1e-30, 0.0, 3.0)


def is_usable(number: torch.Tensor, role: str | None) -> bool:
    if role is None:  # of a mask
        return not number.isnan()
    if role in (TRAINED, "exp_avg", "momentum_buffer"):
        return bool((number.to(torch.promote_types(number.dtype, torch.float32)) ** 2).isfinite())
    return bool(number.isfinite() and (role == "step" or number >= 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "role", [None, TRAINED, "exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "sum", "step"]
)
def test_a_number_is_found_if_nothing_can_be_computed_from_it(role: str | None, dtype: torch.dtype) -> None:
    for number in NUMBERS:
        tensor = torch.tensor([[1.0, 0.5], [number, 2.0]]).to(dtype)
        found = find_unusable_number(tensor, role=role)
        assert (found is None) == is_usable(tensor[1, 0], role), number
        if found is not None:
            assert found == tensor[1, 0].item() or math.isnan(number)
    assert find_unusable_number(torch.empty(0, 3, dtype=dtype), role=role) is None
