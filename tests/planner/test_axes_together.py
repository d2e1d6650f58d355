"""Ranks that share matmuls and sequences and divide experts: what a rank sends and holds, as planned."""

from typing import Any

import pytest

from fullshard.planner.search.search import list_offload_targets
from fullshard.spec.plan import Plan
from tests.fakes.hardware import cpu_of
from tests.planner.dry_step import dry_peak_bytes
from tests.planner.measured import meta_model, model_parallel_bytes, moved_bytes, plan_of, predicted

LAYERS, RANKS, EXPERTS, CHOICES, LENGTH = 1, 4, 8, 2, 64


def mixed_plan(
    *overrides: str, tensor: int = 2, context: int = 1, expert: int = 4, ranks: int = RANKS
) -> Plan:
    axes = {"tensor_parallel": tensor, "context_parallel": context, "expert_parallel": expert}
    return plan_of(
        ranks,
        *(f"model.experts={EXPERTS}", f"model.experts_per_token={CHOICES}", "model.expert_d_ff=128"),
        *(f"sharding.{name}={count}" for name, count in axes.items()),
        *(f"model.layers={LAYERS}", "train.global_batch=8", *overrides),
    )


def test_sent_bytes_of_each_axis_equal_the_plan(ranks: Any) -> None:
    """Tokens between matmuls, and rows of each rank's part of the tokens; attention alone is divided."""
    plan = mixed_plan("recompute.mode=none", "train.loss_chunk=0")
    hidden = 4 * plan.microbatch * LENGTH * plan.run.decoder_config.d_model * plan.accumulation
    # Attention gathers once and reduces once, backward the same and again; embedding and head twice each.
    shared = (5 * LAYERS + 4) * hidden
    rows = 4 * LAYERS * CHOICES * hidden // plan.tensor_parallel
    counts = ranks(RANKS).run(moved_bytes, plan)
    for own in counts:
        assert own["gather_sequence"] + own["reduce_sequence"] == shared
    assert sum(own["exchange_rows"] for own in counts) == RANKS * rows
    numbers = 8 * EXPERTS * LAYERS * plan.accumulation
    assert model_parallel_bytes(plan) == pytest.approx(shared / 2 + (rows + numbers) * 3 / 4, rel=1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        mixed_plan("recompute.mode=none", "model.shared_experts=1", "model.balance_loss=0.01"),
        pytest.param(mixed_plan("recompute.mode=full", expert=1), marks=pytest.mark.long),
        pytest.param(
            mixed_plan("recompute.mode=selective", "model.heads=8", context=2, ranks=8),
            marks=pytest.mark.long,
        ),
    ],
    ids=["tensor-expert", "tensor-alone", "all"],
)
def test_predicted_peak_equals_dry_step(plan: Plan) -> None:
    """As the dry step, which runs the same code as training, if rows are balanced."""
    assert predicted(plan).total == pytest.approx(dry_peak_bytes(meta_model(plan), plan), rel=0.01)


def test_targets_that_the_search_tries_can_be_trained() -> None:
    """With experts that ranks divide, too."""
    run = mixed_plan("offload.tier=auto").run.with_overrides(["offload.tier=auto"])
    targets = list_offload_targets(cpu_of(RANKS), run)
    assert targets
    for tier in targets:
        Plan.from_run(run.with_overrides([f"offload.tier={tier}"]), world_size=RANKS)
