"""A rank whose numbers have gone wrong is found among its replicas, and named."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fullshard.distributed.tensors import local_tensor
from fullshard.errors import TrainError
from fullshard.survival.fingerprint import ReplicaCheck, local_tensor_checksum
from fullshard.survival.phase import PhaseTracker
from fullshard.training.loop import train
from tests.fakes.plans import STRATEGIES
from tests.training.runs import logged, mean_square, run_of, sharded

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@given(st.sampled_from(DTYPES), st.integers(1, 50), st.data())
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype, count: int, data: Any) -> None:
    tensor = torch.arange(count).to(dtype)
    before = local_tensor_checksum(tensor).item()
    octets = tensor.view(torch.uint8)
    octets[data.draw(st.integers(0, octets.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert local_tensor_checksum(tensor).item() != before


def test_words_that_change_places_change_the_checksum() -> None:
    assert (
        local_tensor_checksum(torch.tensor([1.0, 2.0])).item()
        != local_tensor_checksum(torch.tensor([2.0, 1.0])).item()
    )
    large = torch.zeros((1 << 20) + 3)
    large[-1] = 1
    assert local_tensor_checksum(large).item() != local_tensor_checksum(large.flip(0)).item()


def test_scalars_empty_shards_and_negative_zero_have_one() -> None:
    assert local_tensor_checksum(torch.empty(0)).item() == 0
    assert local_tensor_checksum(torch.tensor(0.0)).item() != local_tensor_checksum(torch.tensor(-0.0)).item()


def flip(tensor: Tensor) -> None:
    """A bit of the last word of this rank's part; lower ones the next update may round away."""
    words = local_tensor(tensor.detach()).view(-1).view(torch.int32)
    words[-1] ^= 1 << 20


def flipped(strategy: str, what: str, by: tuple[int, ...]) -> tuple[int, str, str] | None:
    """After step 3 the ranks `by` have one bit otherwise; replicas are compared after steps 2 and 4."""
    still = "optimizer.learning_rate=1e-30"  # so that a moment that differs does not reach the parameters
    run = run_of("train.steps=6", "fault_tolerance.check_replicas_every=2", still, *STRATEGIES[strategy])
    state, plan = sharded(run)
    try:
        for step in train(state, plan, loss=mean_square):
            if step.index == 3 and dist.get_rank() in by:
                flip(state.tensors()[what])
    except TrainError as error:
        return state.step, error.what, str(error.got)
    return None


WEIGHT, MOMENT = "model.layers.1.linear.weight", "optimizer.head.weight.exp_avg_sq"


@pytest.mark.parametrize(
    ("n", "flips", "said"),
    [
        (3, ("no_shard", WEIGHT, (1,)), "rank 1 differs from ranks 0, 2, first in "),
        (2, ("no_shard", MOMENT, (0,)), "ranks 0-1 differ in "),
        (4, ("hybrid_shard", MOMENT, (3,)), "ranks 1, 3 differ in "),
        (4, ("hybrid_shard_zero2", WEIGHT, (0,)), "ranks 0, 2 differ in "),
    ],
)
def test_one_flipped_bit_is_detected_on_all_ranks(
    n: int, flips: tuple[str, str, tuple[int, ...]], said: str, ranks: Any
) -> None:
    for found in ranks(n).run(flipped, *flips):
        assert found is not None
        step, message, got = found
        assert step == 4, "the first comparison after it"
        assert message.startswith(f"replicas are not the same after step 4: {said}{flips[1]}")
        assert got.startswith(f"{said}{flips[1]}")


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("no_shard", "precision.mode=fp32"),
        ("hybrid_shard", "precision.mode=bf16_pure"),
    ],
)
def test_replicas_that_train_alike_are_the_same(strategy: str, more: str, ranks: Any) -> None:
    assert ranks(4).run(undisturbed, strategy, more) == [6] * 4


def undisturbed(strategy: str, more: str) -> int:
    state, plan = sharded(run_of("fault_tolerance.check_replicas_every=1", more, *STRATEGIES[strategy]))
    return len(list(train(state, plan, loss=mean_square)))


def differences_of_full_shard() -> tuple[str, str] | None:
    """A shard is one rank's alone; the optimizer's count of steps is every rank's."""
    shard = flipped("full_shard", WEIGHT, (1,))
    assert shard is None
    found = flipped("full_shard", "optimizer.head.weight.step", (1,))
    return found and found[1:]


def test_full_shard_compares_the_replicated_tensors(ranks: Any) -> None:
    for found in ranks(3).run(differences_of_full_shard):
        assert found is not None
        assert "rank 1 differs from ranks 0, 2, first in optimizer.head.weight.step" in found[0]


def difference_of_an_entry_of_one_rank(strategy: str) -> str:
    state, plan = sharded(run_of("fault_tolerance.check_replicas_every=1", *STRATEGIES[strategy]))
    tensors = {name: one for name, one in state.tensors().items() if name.startswith("model.")}
    if dist.get_rank() == 1:
        tensors = {"optimizer.own": torch.zeros(())} | tensors
    with pytest.raises(TrainError) as raised:
        ReplicaCheck(plan).compare_if_due(state.model, lambda: tensors, step=1, where=PhaseTracker())
    return raised.value.what


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_an_entry_that_one_rank_alone_has_is_named(strategy: str, ranks: Any) -> None:
    for what in ranks(4).run(difference_of_an_entry_of_one_rank, strategy):
        assert "rank 1 differs from ranks 0, 2-3, first in optimizer.own" in what


def messages_without_replicas() -> list[str]:
    with logged() as messages:
        undisturbed("full_shard", "precision.mode=fp32")
    return messages


def test_a_plan_without_replicas_is_logged_once_by_rank_zero(ranks: Any) -> None:
    first, second = ranks(2).run(messages_without_replicas)
    assert ["full_shard holds every shard on one rank alone" in text for text in first] == [True]
    assert second == []
