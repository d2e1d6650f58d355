"""An embedding that nothing else reads is gathered once a step, which changes no number."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.parallel.units import find_units
from fullshard.spec.run import Run
from fullshard.training.loop import train
from tests.parallel.operations import CountOperations
from tests.training.runs import BATCH, WIDTH, Layer, meta, run_of, sharded, whole


class Lookup(nn.Module):
    """A regression on rows of a table, which the first number of each input selects."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding((x[:, 0] * 3).long().remainder(7))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def parameters_after_a_run(overrides: tuple[str, ...]) -> dict[str, Tensor]:
    state, plan = sharded(run_of("sharding.strategy=full_shard", *overrides), model=Lookup)
    for step in train(state, plan, loss=loss):
        assert not step.skipped
    return whole(state.model)


def gathers_of_a_step(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Returns (all-gathers of forward and backward, units with parameters)."""
    state, plan = sharded(run_of("sharding.strategy=full_shard", *overrides), model=Lookup)
    x = torch.randn(BATCH // plan.world_size, WIDTH)
    with torch.autograd.set_multithreading_enabled(False), CountOperations() as counted:
        state.model(x).sum().backward()
    units = [m for m in state.model.modules() if isinstance(m, FSDPModule)]
    return counted.total("all_gather_copy_in"), sum(
        bool(list(m.parameters())) for m in units if m is not state.model
    )


def test_an_embedding_is_gathered_once_a_step_and_learns_as_without_ranks(ranks):
    count, units = ranks(2).run(gathers_of_a_step, ())[0]
    # Twice each, but once the embedding, and the head, whose backward follows its forward.
    assert count == 2 * units - 2
    kept = ('sharding.units.overrides=[{match="embedding", reshard_after_forward=false}]',)
    once, always_there, alone = (
        ranks(n).run(parameters_after_a_run, own)[0] for n, own in ((2, ()), (2, kept), (1, ()))
    )
    assert all(torch.equal(once[name], always_there[name]) for name in once)
    for name, value in alone.items():
        torch.testing.assert_close(once[name], value, rtol=1e-5, atol=1e-6)


class Tied(Lookup):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 7, bias=False)
        self.again.weight = self.embedding.weight


@pytest.mark.parametrize(("model", "found"), [(Lookup, ["embedding"]), (Tied, [])])
def test_only_an_embedding_that_nothing_else_reads_is_left_out_of_backward(model, found):
    units = find_units(meta(model), Run().sharding.units)
    assert [unit.name for unit in units if unit.is_embedding] == found
