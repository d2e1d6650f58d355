"""Under a cap on live tensor bytes, a plan that is said to fit runs, and one that misses by 5 % does not."""

from typing import Any

import pytest
import torch

from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.spec.plan import Plan
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step
from tests.planner.dry_step import LiveBytes
from tests.planner.measured import meta_model, microbatches, plan_of

# The norm's and the loss's scalars, the random state of recomputed blocks, and buffers of attention.
SCRATCH_BYTES = 128 * 1024


def runs(plan: Plan, cap: int) -> bool:
    """Whether a step of real ranks, after one that made the optimizer's state, stays under `cap`."""
    model = shard(meta_model(plan), plan)
    state = TrainState(model, build_optimizer(model, plan))

    def step() -> None:
        run_step(state, plan, microbatches=microbatches(plan), loss=next_token_loss)

    step()
    live = LiveBytes("cpu", cap=cap)
    lasting: list[Any] = [*model.parameters(), *model.buffers()]
    lasting += [t for one in state.optimizer.state.values() for t in one.values()]
    try:
        with torch.autograd.set_multithreading_enabled(False), live.watch_resizes_and_random_states():
            live.track(tensor for tensor in lasting if isinstance(tensor, torch.Tensor))
            with live:
                step()
    except MemoryError:
        return False
    return True


@pytest.mark.parametrize(
    "overrides",
    [
        ["sharding.strategy=full_shard", "recompute.mode=full"],
        pytest.param(["sharding.strategy=zero1", "precision.mode=bf16"], marks=pytest.mark.long),
        pytest.param(["sharding.strategy=no_shard", "model.vocabulary=8192"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_what_is_said_to_fit_runs_and_what_misses_by_five_percent_does_not(ranks, overrides):
    plan = plan_of(2, *overrides)
    needed = peak_bytes(describe(meta_model(plan), plan, loss=next_token_loss), plan).total
    assert all(ranks(2).run(runs, plan, needed + SCRATCH_BYTES))
    assert not any(ranks(2).run(runs, plan, int(needed / 1.05)))
