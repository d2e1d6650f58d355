"""A return to the newest checkpoint, past the batches that led to a loss spike.

PaLM's authors did this by hand: they restarted from before the spike, without the batches seen before and
during it; the spike did not come back (arXiv:2204.02311, section 5.1).
"""

from pathlib import Path

from fullshard.checkpoint import load
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.training.state import TrainState


def roll_back(state: TrainState, directory: str | Path | CheckpointLocation, *, plan: Plan) -> bool:
    """Loads the newest complete checkpoint of `directory`, and moves the data position forward. Collective.

    The batches since that checkpoint and the next `survival.skip_batches` are not trained on. A plain
    iterable has no position and just continues. Returns False, with nothing changed, if there is no
    checkpoint yet.

    Raises TrainError after `survival.max_rollbacks`, CheckpointError if no checkpoint is complete.
    """
    survival = plan.run.survival
    if state.rollbacks >= survival.max_rollbacks:
        raise TrainError(
            f"the run was rolled back {state.rollbacks} times, and spikes again at step {state.step}.",
            got=f"survival.max_rollbacks = {survival.max_rollbacks}",
            why="other batches did not help, so it is not the batches",
            fix="a lower optimizer.learning_rate, longer schedule.warmup_steps, an older checkpoint, or a "
            "larger survival.spike_sigma if the curve is just rough",
        )
    next_batch, rollbacks = state.step + state.data_offset, state.rollbacks
    if not load(state, directory, missing_ok=True):
        return False
    state.rollbacks = rollbacks + 1
    state.data_offset = next_batch + survival.skip_batches - state.step
    return True
