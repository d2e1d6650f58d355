"""Scaling: each row is the best plan on its ranks, and efficiency is relative to the first."""

import pytest

from fullshard.errors import SpecError
from fullshard.planner.result import PlanRequest
from fullshard.planner.scaling import efficiencies, parse_rank_counts, plan_scaling
from fullshard.planner.search.search import search
from fullshard.planner.target import PlanTarget
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

SPEC = decoder_spec(LLAMA_8B)
HARDWARE = hardware_of(1, 8, gib=120)
QUESTION = PlanRequest(PlanTarget("8B"), run_for(LLAMA_8B, "train.global_batch=16"), HARDWARE, spec=SPEC)


def test_strong_keeps_the_batch_and_weak_the_batch_per_rank():
    points = plan_scaling(QUESTION, (8, 16, 64))
    strong, weak = [point.strong for point in points], [point.weak for point in points]
    assert [plan and plan.run.train.global_batch for plan in strong] == [16, 16, None]
    assert [plan and plan.run.train.global_batch for plan in weak] == [16, 32, 128]
    assert strong[0] == weak[0] == search(SPEC, HARDWARE, QUESTION.asked).best
    parts = efficiencies(weak)
    assert parts[0] == 1
    assert all(part is not None and 0 < part < 1.3 for part in parts)
    assert efficiencies(strong)[2] is None


@pytest.mark.parametrize("text", ["", "8,x", "0", "-8"])
def test_only_numbers_of_ranks_are_taken(text: str):
    with pytest.raises(SpecError, match="numbers of ranks"):
        parse_rank_counts(text)


def test_ranks_that_do_not_fill_nodes_are_refused():
    with pytest.raises(SpecError, match="whole nodes"):
        plan_scaling(QUESTION, (12,))
