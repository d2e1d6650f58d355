"""A deadline: the batch grows only if the user gave none, and no further than the deadline needs."""

import pytest

from fullshard.errors import PlanError
from fullshard.planner.result import PlanRequest, fewest_gpus_request
from fullshard.planner.search.capacity import fewest_ranks_for_deadline
from fullshard.planner.target import PlanTarget
from fullshard.report.plan import TrainingBudget
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

SPEC = decoder_spec(LLAMA_8B)
BUDGET = TrainingBudget(tokens=10**11)
DAYS = 4


def test_a_deadline_raises_a_batch_that_nobody_gave_as_far_as_it_needs(capsys: pytest.CaptureFixture[str]):
    run = run_for(LLAMA_8B, "train.global_batch=16")
    question = PlanRequest(PlanTarget("8B"), run, hardware_of(1, 8), spec=SPEC)
    with pytest.raises(PlanError, match="no number of ranks"):
        fewest_gpus_request(question, days=DAYS, budget=BUDGET)

    raised = fewest_gpus_request(question, days=DAYS, budget=BUDGET, may_raise_batch=True)
    assert "the deadline needs larger steps" in capsys.readouterr().err
    batch = raised.asked.train.global_batch
    assert batch > 16
    found = fewest_ranks_for_deadline(
        SPEC, hardware_of(1, 8), run=raised.asked, tokens=BUDGET.tokens, days=DAYS
    )
    assert (found.days <= DAYS, found.nodes * found.ranks_per_node) == (True, raised.hardware.world_size)
    half = run_for(LLAMA_8B, f"train.global_batch={batch // 2}")
    with pytest.raises(PlanError, match="no number of ranks"):
        fewest_ranks_for_deadline(SPEC, hardware_of(1, 8), run=half, tokens=BUDGET.tokens, days=DAYS)
