"""State of any tier goes into, and comes out of, the one reshardable checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fullshard.checkpoint import BackgroundSaver, load, save
from fullshard.training.state import TrainState
from fullshard.weights.export import full_state
from tests.training.runs import advance, local_bits, run_of, same_bits, sharded
from tests.training.test_offloaded import TIERS, TINY, Odd

STEPS = 20
Bits = dict[str, Tensor]


def state_on(tier: str, directory: str, *more: str) -> tuple[TrainState, Any]:
    sets = [f"train.steps={STEPS}", "optimizer.clip_norm=0.5", f"offload.tier={tier}", f"run.dir={directory}"]
    return sharded(run_of(*sets, TINY, *more), model=Odd)


def whole_of(state: TrainState) -> Bits:
    return {name: tensor.clone() for name, tensor in full_state(state) if not name.startswith("rng.")}


def hop(tier: str, to: int, directory: str, saved: str) -> tuple[Bits, list[float], Bits]:
    """Returns the loaded state, the losses of the steps up to `to`, and the saved state."""
    state, plan = state_on(tier, directory)
    load(state, saved, missing_ok=to <= 4)
    loaded, losses = whole_of(state), advance(state, plan, to=to)
    save(state, saved)
    return loaded, losses, whole_of(state)


HOPS = [
    (4, "optimizer:nvme"),
    (2, "none"),
    (3, "optimizer:cpu"),
    (1, "optimizer:nvme"),
    (2, "params+optimizer:cpu"),
]


def test_state_goes_from_any_ranks_and_tier_to_any_others(ranks: Any, tmp_path: Path) -> None:
    """Bit for bit, and on along the curve of the run that stays where it is."""
    saved = str(tmp_path / "checkpoints")
    before: Bits | None = None
    curve: list[float] = []
    for i, (n, tier) in enumerate(HOPS):
        by_rank = ranks(n).run(hop, tier, 4 * (i + 1), f"{tmp_path}/{i}", saved)
        for loaded, _, _ in by_rank:
            assert before is None or same_bits(loaded, before)
        _, losses, before = by_rank[0]
        curve += losses
    (undisturbed,) = ranks(1).run(undisturbed_curve)
    assert curve == pytest.approx(undisturbed, rel=1e-5)


def undisturbed_curve() -> list[float]:
    return advance(*state_on("none", "none"), to=STEPS)


def after_loading(tier: str, directory: str, at: int, *more: str) -> list[Bits]:
    """This rank's bits when saved, when loaded by another state, which had come further, and two steps on."""
    state, plan = state_on(tier, f"{directory}/first", *more)
    advance(state, plan, to=at)
    save(state, f"{directory}/checkpoints")
    bits = [local_bits(state)]
    other, _ = state_on(tier, f"{directory}/second", *more)
    advance(other, plan, to=5)
    assert not same_bits(local_bits(other), bits[0])
    load(other, f"{directory}/checkpoints")
    bits.append(local_bits(other))
    for one in (state, other):
        advance(one, plan, to=5)
        bits.append(local_bits(one))
    return bits


BEFORE, AMID = (0,), (3, "offload.moments=bf16")
QUICK = [("optimizer:cpu", BEFORE), ("params+optimizer:nvme", AMID)]


@pytest.mark.parametrize(
    ("tier", "more"),
    [
        pytest.param(
            tier, more, id=f"{tier}, {more[0]}", marks=[] if (tier, more) in QUICK else pytest.mark.long
        )
        for tier in TIERS
        for more in (BEFORE, AMID)
    ],
)
def test_loaded_state_continues_bitwise(tier: str, more: tuple[Any, ...], ranks: Any, tmp_path: Path) -> None:
    """Also from before the first step, when there are no moments."""
    for saved, loaded, on, loaded_on in ranks(3).run(after_loading, tier, str(tmp_path), *more):
        assert same_bits(saved, loaded)
        assert same_bits(on, loaded_on)


def saved_beside(tier: str, directory: str) -> tuple[Bits, Bits]:
    """This rank's bits when a save in the background began, and those that another state loads."""
    state, plan = state_on(tier, f"{directory}/first")
    advance(state, plan, to=2)
    with BackgroundSaver(f"{directory}/checkpoints") as saver:
        saver.save(state)
        when = local_bits(state)
        advance(state, plan, to=6)
        saver.wait()
    other, _ = state_on(tier, f"{directory}/second")
    load(other, f"{directory}/checkpoints")
    assert other.step == 2
    return when, local_bits(other)


@pytest.mark.parametrize("tier", ["optimizer:cpu", "params+optimizer:cpu"])
def test_background_save_has_the_step_at_its_start(tier: str, ranks: Any, tmp_path: Path) -> None:
    for when, loaded in ranks(2).run(saved_beside, tier, str(tmp_path)):
        assert same_bits(when, loaded)
