"""Flat parameters of FSDP1's local state dicts are divided where its program joined the parameters."""

import pytest
import torch

from fullshard.errors import CheckpointError
from fullshard.takeover.rank_files import split_flat_parameters
from fullshard.takeover.source import LazyTensor


def divided(sizes: tuple[int, ...], *, paddings: tuple[int, ...], ranks: int) -> list[list[float]]:
    """Returns the parameters found in a vector of parameters of `sizes`, each filled with its number."""
    pairs = enumerate(zip(sizes, paddings, strict=True))
    vector = torch.cat([torch.tensor([i] * size + [-1.0] * padding) for i, (size, padding) in pairs])
    parts = [{"": LazyTensor.from_tensor(one)} for one in vector.view(ranks, -1)]
    moments = {f"p{i}": {"exp_avg": LazyTensor.from_tensor(torch.ones(n))} for i, n in enumerate(sizes)}
    found = split_flat_parameters({"_flat_param": parts}, moments)
    return [found[name].read().tolist() for name in moments]


@pytest.mark.parametrize(
    ("sizes", "paddings", "ranks"),
    [
        ((3, 1), (0, 0), 2),
        ((3, 1), (1, 1), 2),  # Linear(3, 1) with use_orig_params: 6 elements
        ((20, 4), (4, 0), 2),  # Linear(5, 4), computed in bf16: 28 elements
        ((20, 4), (0, 1), 5),  # 24 elements in 5 equal parts
    ],
)
def test_parameters_are_found_behind_each_padding_of_fsdp1(
    sizes: tuple[int, ...], paddings: tuple[int, ...], ranks: int
) -> None:
    wanted = [[float(i)] * size for i, size in enumerate(sizes)]
    assert divided(sizes, paddings=paddings, ranks=ranks) == wanted


@pytest.mark.parametrize(("end", "ranks"), [(8, 32), (1, 1)])
def test_a_vector_that_can_be_divided_in_two_ways_or_in_none_is_refused(end: int, ranks: int) -> None:
    with pytest.raises(CheckpointError, match="cannot be divided into parameters"):
        divided((20, 4), paddings=(0, end), ranks=ranks)
