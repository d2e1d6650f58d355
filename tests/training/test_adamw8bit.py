"""Moments in 8 bits: they train as moments in 32 do, and any ranks resume from others' checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.distributed.tensors import local_tensor
from fullshard.observe.memory import storage_bytes_of_tensors
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.low_bit_adamw import dequantize, import_adamw8bit_class, quantize_state_for_optimizer
from fullshard.training.state import TrainState
from tests.fakes.sampling import sampled
from tests.training.runs import run_of, sharded

pytest.importorskip("torchao")

ROWS, COLUMNS = 128, 64  # over one and two ranks whole blocks of 256 and at least 4096; over three not


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(COLUMNS, ROWS)
        self.down = nn.Linear(ROWS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Rotations:
    """x -> its columns in another order."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(plan.run.train.global_batch, COLUMNS, generator=generator)
        return [rows[rank * plan.microbatch : (rank + 1) * plan.microbatch]]


def rotated(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, dims=1)).square().mean()


def wide(*more: str) -> tuple[TrainState, Plan]:
    units = ('sharding.units.names=["up", "down"]',)
    run = run_of("optimizer.clip_norm=0", "train.steps=10", *units, *more)
    return sharded(run, model=Wide, data=Rotations())


def moments(state: TrainState) -> dict[str, Any]:
    """This rank's parts of the moments, by parameter."""
    return {
        f"{name}.{key}": local_tensor(state.optimizer.state[parameter][key])
        for name, parameter in state.model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


def losses(*more: str) -> list[float]:
    state, plan = wide(*more)
    return [step.loss for step in train(state, plan, loss=rotated)]


EIGHT = "optimizer.name=adamw8bit"


def test_it_trains_as_adamw_does(ranks: Any) -> None:
    exact, coarse = (ranks(2).run(losses, *more)[0] for more in ((), (EIGHT,)))
    assert exact[-1] < 0.7 * exact[0]
    assert coarse == pytest.approx(exact, rel=0.02)
    assert coarse != exact


def bytes_of_state() -> tuple[int, set[str]]:
    state, plan = wide(EIGHT)
    next(iter(train(state, plan, loss=rotated)))
    kept_moments = moments(state)
    kinds = {name for name, kept in kept_moments.items() if type(kept).__name__ == "OptimState8bit"}
    return storage_bytes_of_tensors(kept_moments.values()), kinds


def test_large_shards_are_kept_in_a_byte_a_moment_and_small_ones_as_they_are(ranks: Any) -> None:
    matrix = ROWS * COLUMNS // 2
    quantised = matrix + 4 * matrix // 256 + 4 * 256
    small = 4 * (ROWS + COLUMNS) // 2
    for size, kinds in ranks(2).run(bytes_of_state):
        assert size == 2 * (2 * quantised + small)
        assert kinds == {f"{m}.weight.{key}" for m in ("up", "down") for key in ("exp_avg", "exp_avg_sq")}
    assert all(not kinds for _, kinds in ranks(3).run(bytes_of_state)), "43 rows of 64 are no whole blocks"


# Checkpoints #
def some_steps(state: TrainState, plan: Plan) -> None:
    for _, _step in zip(range(4), train(state, plan, loss=rotated), strict=False):
        pass


def saved(directory: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Saves; returns the whole state, and this rank's codes and scales."""
    state, plan = wide(EIGHT)
    some_steps(state, plan)
    save(state, directory)
    return _gathered(state), _codes(state)


def loaded(directory: str) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Loads; returns the whole state, this rank's codes and scales, and the next loss."""
    state, plan = wide(EIGHT)
    load(state, directory)
    full, codes = _gathered(state), _codes(state)
    return full, codes, next(iter(train(state, plan, loss=rotated))).loss


def _gathered(state: TrainState) -> dict[str, Tensor]:
    tensors = {n: t for n, t in state.tensors().items() if not n.startswith("rng.")}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}


def _codes(state: TrainState) -> dict[str, Any]:
    return {
        name: (kept.codes.clone(), kept.scale.clone()) if hasattr(kept, "codes") else kept
        for name, kept in moments(state).items()
    }


@pytest.mark.parametrize("n", sampled([1, 2, 3], here=[3]))
def test_any_ranks_resume_from_two(n: int, ranks: Any, tmp_path: Path) -> None:
    full, codes = ranks(2).run(saved, str(tmp_path))[0]
    assert full["optimizer.up.weight.exp_avg"].dtype is torch.float32
    found = ranks(n).run(loaded, str(tmp_path))
    for rank, (own, own_codes, loss) in enumerate(found):
        assert loss == found[0][2]
        for name, tensor in full.items():
            # A block of two ranks' is one of one rank's, with the same in it, up to its scale's last bit.
            torch.testing.assert_close(own[name], tensor, rtol=3e-7, atol=0.0, msg=name)
        if n == 2 and rank == 0:
            for name, kept in codes.items():
                if isinstance(kept, tuple):
                    assert torch.equal(own_codes[name][0], kept[0]), name
                    torch.testing.assert_close(own_codes[name][1], kept[1], rtol=3e-7, atol=0.0)


def test_negative_extremes_keep_their_codes() -> None:
    """The first code is not the whole scale of a block whose largest value is negative."""
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = import_adamw8bit_class()([parameter])
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    values.view(-1, 256)[::2].abs_().neg_()
    once = quantize_state_for_optimizer(optimizer, parameter, state={"exp_avg": values})["exp_avg"]
    for _ in range(3):
        again = quantize_state_for_optimizer(optimizer, parameter, state={"exp_avg": dequantize(once)})[
            "exp_avg"
        ]
        assert torch.equal(local_tensor(again).codes, local_tensor(once).codes)
        once = again
    spread = values.view(-1, 256).abs().amax(1, keepdim=True)
    error = (dequantize(once) - values).view(-1, 256).abs() / spread
    assert error.max() < 0.02
