"""State outside of the device: the same bits as on it, whatever the tier, the ranks and the strategy."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.models.build import build_model
from fullshard.models.loss import next_token_loss
from fullshard.offload.state import find_offloaded_state
from fullshard.offload.store import MasterAndMoments
from fullshard.spec.groups import OffloadGroup
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.training.runs import WIDTH, Pairs, Regression, local_bits, mean_square, run_of, same_bits, sharded

TIERS = ("optimizer:cpu", "params+optimizer:cpu", "optimizer:nvme", "params+optimizer:nvme")
STEPS = 20
VOCABULARY = 31
# Of 1,024 elements: large shards are cut, and fill none of their groups.
TINY = "offload.sub_group_parameters=1"
# Whole, since what is drawn to round a bf16 parameter by depends on where it is cut.
WHOLE = "offload.sub_group_parameters=4096"

Found = tuple[list[tuple[float, float, bool]], dict[str, Tensor]]


class Odd(nn.Module):
    """x (batch, 5) -> (batch, 2). Shards of several groups and of less than a vector, tied weights, a scalar,
    what is frozen, and, on three and four ranks, ranks without a row of some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, 643), nn.Linear(643, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        )
        self.layers[3].requires_grad_(False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.layers[2].weight
        self.head = nn.Linear(WIDTH, 2)
        self.gain = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.again(x)) * self.gain


class Spoilt(Pairs):
    """Pairs whose third step is skipped."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().microbatches(step, rank=rank, plan=plan):
            yield x, y.fill_(torch.nan) if step == 2 else y


@dataclass(frozen=True)
class Case:
    """`settings`: beside the tier's."""

    model: str
    settings: tuple[str, ...] = ()
    groups: str = TINY


def adapted(run: Run) -> tuple[TrainState, Plan]:
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(build_model(run), plan)
    return TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY)), plan


ADAPTERS = (
    *("adapter.rank=4", "adapter.alpha=12", "adapter.base_dtype=bf16", "model.d_model=32"),
    *("model.layers=2", "model.d_ff=48", f"model.vocabulary={VOCABULARY}", "data.sequence_length=9"),
)


def state_of(case: Case, *more: str) -> tuple[TrainState, Plan]:
    """On this world's ranks. The norm is clipped in every step."""
    settings = (f"train.steps={STEPS}", "optimizer.clip_norm=0.05", *case.settings, *more)
    if case.model == "adapters":
        return adapted(run_of(*ADAPTERS, *settings))
    if case.model == "spoilt":
        return sharded(run_of(*settings), model=Odd, data=Spoilt())
    return sharded(run_of(*settings), model={"odd": Odd, "regression": Regression}[case.model])


def found_by(case: Case, *more: str) -> Found:
    """Losses, norms and what was skipped, and this rank's bits after a run."""
    state, plan = state_of(case, *more)
    loss = next_token_loss if case.model == "adapters" else mean_square
    steps = [(repr(one.loss), repr(one.grad_norm), one.skipped) for one in train(state, plan, loss=loss)]
    return steps, local_bits(state)


def tier_of(tier: str, case: Case, directory: str) -> tuple[str, ...]:
    return f"offload.tier={tier}", f"run.dir={directory}/{tier}", case.groups


def differences(cases: Sequence[Case], tiers: Sequence[str], directory: str) -> list[str]:
    """Returns how this rank differs from a run without a tier."""
    found: list[str] = []
    for i, case in enumerate(cases):
        steps, bits = found_by(case)
        for tier in tiers:
            other_steps, other = found_by(case, *tier_of(tier, case, f"{directory}/{i}"))
            if other_steps != steps:
                found.append(f"{case}, {tier}: losses, norms or skipped steps")
            if not same_bits(bits, other):
                names = [n for n in bits.keys() & other.keys() if not torch.equal(bits[n], other[n])]
                found.append(f"{case}, {tier}: {sorted(names or bits.keys() ^ other.keys())}")
    return found


HYBRID = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")
EACH, LAST = "train.gradient_sync=every_microbatch", "train.gradient_sync=last_microbatch"
PURE = "precision.mode=bf16_pure"
ON_DEVICE = "offload.update=device"
SAMPLE = {
    1: [Case("odd", ("train.microbatch=6", LAST))],
    2: [
        Case("odd", ("precision.mode=bf16", "sharding.strategy=shard_grad_op", "train.microbatch=3", LAST)),
        Case("spoilt", ("precision.mode=bf16_reduce", ON_DEVICE), WHOLE),
        Case("regression", ("sharding.strategy=no_shard", "recompute.mode=full", ON_DEVICE)),
        Case("adapters", ("precision.mode=bf16", "train.microbatch=3", LAST)),
    ],
    3: [
        Case("odd", (PURE,), WHOLE),
        Case("odd", ("sharding.strategy=zero1", "train.microbatch=2", EACH, ON_DEVICE), WHOLE),
    ],
    4: [Case("odd", (*HYBRID, "train.microbatch=1", EACH))],
}


FEW_STEPS = "train.steps=5"


@pytest.mark.parametrize("n", SAMPLE)
def test_offloaded_run_is_bitwise_equal(n: int, ranks: Any, tmp_path: Any) -> None:
    cases = [replace(case, settings=(*case.settings, FEW_STEPS)) for case in SAMPLE[n]]
    for i, case in enumerate(cases):  # each tier with a part of them
        tiers = TIERS[i % 2 :: 2]
        assert ranks(n).run(differences, [case], tiers, f"{tmp_path}/{i}") == [[]] * n


def tiers_agree(case: Case, directory: str) -> list[bool]:
    """Returns whether each tier computes the numbers of the first."""
    found = [found_by(case, *tier_of(tier, case, directory)) for tier in TIERS]
    return [steps == found[0][0] and same_bits(bits, found[0][1]) for steps, bits in found]


def test_moments_in_bf16_are_rounded_alike_on_every_tier(ranks: Any, tmp_path: Any) -> None:
    case = Case("odd", ("offload.moments=bf16", "precision.mode=bf16", FEW_STEPS))
    assert ranks(3).run(tiers_agree, case, str(tmp_path)) == [[True] * len(TIERS)] * 3


def drawn(tier: str, directory: str) -> tuple[Tensor, Tensor]:
    """A validation between two steps, and before the first."""
    case = Case("odd")
    state, plan = state_of(case, *tier_of(tier, case, directory))
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)

    def validate() -> Tensor:
        with torch.no_grad():
            return state.model(x).clone()

    before = validate()
    for step in train(state, plan, loss=mean_square):
        if step.index == 3:
            break
    return before, validate()


def test_validation_sees_the_last_update(ranks: Any, tmp_path: Any) -> None:
    expected = ranks(2).run(drawn, "none", str(tmp_path))
    for tier in TIERS:
        for own, other in zip(expected, ranks(2).run(drawn, tier, str(tmp_path)), strict=True):
            assert all(map(torch.equal, own, other))
            assert not torch.equal(*other)


def gathers_in_an_update(directory: str) -> tuple[bool, bool, bool]:
    """While the update stands before its last groups: whether what is updated can be gathered, whether what
    is not waits for it, and then has the new values."""
    state, _ = state_of(Case("odd"), *tier_of("optimizer:nvme", Case("odd"), directory))
    offloaded = find_offloaded_state(state.model)
    assert offloaded is not None
    layers = cast(list[FSDPModule], list(cast(nn.ModuleList, state.model.layers)))
    last = cast(FSDPModule, cast(Odd, state.model).head)
    resumed, gathered = threading.Event(), threading.Event()
    first = {name for name in offloaded.names if name.startswith("layers.0.")}

    def update(group: OffloadGroup, parts: MasterAndMoments) -> None:
        if not first & set(group.names):
            resumed.wait()
        parts.master.fill_(7.0)

    def gather_the_last() -> None:
        last.unshard()
        gathered.set()

    offloaded.start_update(update, release=lambda _: None)
    layers[0].unshard()
    early = bool((cast(nn.Linear, layers[0]).weight == 7.0).all())
    thread = threading.Thread(target=gather_the_last)
    thread.start()
    waits = not gathered.wait(0.2)
    resumed.set()
    thread.join()
    late = bool((cast(nn.Linear, last).weight == 7.0).all())
    offloaded.wait_for_update()
    return early, waits, late


def test_gather_waits_for_its_part_of_the_update(ranks: Any, tmp_path: Any) -> None:
    assert ranks(1).run(gathers_in_an_update, str(tmp_path)) == [(True, True, True)]
