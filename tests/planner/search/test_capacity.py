"""The fewest ranks, and the largest microbatch, sequence and model: each with the next one failing."""

from dataclasses import replace

import pytest

from fullshard.errors import PlanError
from fullshard.planner.search.capacity import (
    fewest_ranks_for_deadline,
    largest_fitting_microbatch,
    largest_fitting_sequence_length,
)
from fullshard.planner.search.search import search
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

SPEC = decoder_spec(LLAMA_8B)


def test_the_fewest_ranks_make_the_deadline_and_one_step_fewer_do_not():
    run = run_for(LLAMA_8B, "train.global_batch=64")
    hardware, tokens = hardware_of(1, 8), 10**11
    found = fewest_ranks_for_deadline(SPEC, hardware, run=run, tokens=tokens, days=20)
    ranks = found.nodes * found.ranks_per_node
    assert found.days <= 20
    for fewer in (d for d in (1, 2, 4, 8, 16, 32) if d < ranks):
        fleet = hardware.with_rank_counts(nodes=max(1, fewer // 8), ranks_per_node=min(fewer, 8))
        best = search(SPEC, fleet, run).best
        if best is not None and best.prediction is not None:
            assert tokens / best.prediction.tokens_per_second / 86_400 > 20


def test_a_deadline_that_cannot_be_made_is_refused_with_the_nearest():
    run = run_for(LLAMA_8B, "train.global_batch=16")
    with pytest.raises(PlanError, match="no number of ranks") as error:
        fewest_ranks_for_deadline(SPEC, hardware_of(1, 8), run=run, tokens=10**11, days=4)
    assert "days on" in str(error.value)


def test_the_largest_microbatch_fits_and_the_next_does_not():
    run, hardware = run_for(LLAMA_8B, "train.global_batch=512"), hardware_of(1, 8)
    found = largest_fitting_microbatch(SPEC, hardware, run=run)
    assert found.plan.microbatch == found.size
    pinned = run_for(LLAMA_8B, "train.global_batch=512", f"train.microbatch={2 * found.size}")
    assert search(SPEC, hardware, pinned).best is None


def test_the_largest_microbatch_is_one_without_offload_unless_a_target_is_pinned():
    hardware = hardware_of(1, 8).model_copy(update={"host_bytes_per_second": 2e10})
    sizes: list[int] = []
    for pin in ("offload.tier=auto", "offload.tier=params+optimizer:cpu"):
        found = largest_fitting_microbatch(
            SPEC, hardware, run=run_for(LLAMA_8B, "train.global_batch=512", pin)
        )
        assert found.plan.run.offload.offloads_optimizer == (pin != "offload.tier=auto")
        sizes.append(found.size)
    assert sizes[0] <= sizes[1]


def describe(run: Run) -> ModelSpec:
    return decoder_spec(replace(LLAMA_8B, sequence=run.data.sequence_length))


def test_the_largest_sequence_fits_and_the_next_does_not():
    run, hardware = run_for(LLAMA_8B, "train.global_batch=8"), hardware_of(1, 8)
    lengths = [2**power for power in range(10, 22)]
    found = largest_fitting_sequence_length(describe, hardware, run=run, lengths=lengths)
    assert found.plan.run.data.sequence_length == found.size
    with pytest.raises(PlanError, match="no sequence length fits"):
        largest_fitting_sequence_length(describe, hardware, run=run, lengths=[2 * found.size])
