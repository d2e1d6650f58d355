"""FSDP2's private functions that this package replaces."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.parallel.apply import apply_recompute_and_fsdp_on_meta, choose_sharding
from fullshard.spec.plan import Plan
from fullshard.torch_private.fsdp import OwnChunks
from fullshard.torch_private.tensors import tree_leaves
from tests.planner.dry_step import fake_ranks
from tests.training.runs import run_of


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 12), st.data())
def test_chunks_are_those_of_torch_filled_up_with_empty_tensors(shape: list[int], count: int, data: Any):
    tensor = torch.rand(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    theirs, own = torch.chunk(tensor, count, dim), OwnChunks(tensor, count, dim)
    for index in range(count):
        expected = theirs[index] if index < len(theirs) else tensor.new_empty(0)
        assert own[index].shape == expected.shape
        assert own[index].equal(expected)


class CountTensors(TorchDispatchMode):
    """Counts the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.count += len(tree_leaves(results))
        return results


def tensors_made_by_sharding(ranks: int) -> int:
    plan = Plan.from_run(run_of(f"train.global_batch={2 * ranks}"), world_size=ranks, device="cpu")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    with fake_ranks(ranks):
        prepared = choose_sharding(model, plan)
        with CountTensors() as made:
            apply_recompute_and_fsdp_on_meta(model, prepared)
    return made.count


def test_sharding_makes_as_many_tensors_with_many_ranks_as_with_few():
    assert tensors_made_by_sharding(512) == tensors_made_by_sharding(4)
