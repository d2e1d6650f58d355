"""Frozen parameters with the tiers that offload parameters: kept beside it, and never changed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fullshard.checkpoint import load, save
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import OffloadError, ShardError
from fullshard.observe.memory import storage_bytes_of_tensors
from fullshard.offload.drive import SYSTEM
from fullshard.spec.groups import PAGE_BYTES
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import restore_train_state
from fullshard.training.shard import close_offloaded_state, offload_settings, shard
from fullshard.training.state import TrainState
from fullshard.weights.pretrained import load_pretrained
from tests.training.runs import (
    WIDTH,
    Pairs,
    Regression,
    advance,
    local_bits,
    mean_square,
    meta,
    run_of,
    same_bits,
)

DRIVE = "params+optimizer:nvme"
HOST = "params+optimizer:cpu"
Bits = dict[str, Tensor]


def shard_on(tier: str, model: nn.Module, plan: Plan, *, unset: bool = False) -> nn.Module:
    """With parameters in host memory, CPU ranks have them where they compute. Here they take the way of ranks
    whose device has other memory: copies in the host's memory, and masters elsewhere, here on the drive."""
    init = "none" if unset else None
    if tier != HOST:
        return shard(model, plan, init=init)
    settings = replace(offload_settings(plan, SYSTEM), shards_on_drive=None)
    return shard(model, plan, init=init, offload=settings)


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it. Rows that 2, 3 and 4 ranks divide unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 331), nn.Linear(331, WIDTH)
        self.requires_grad_(False)
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.relu(self.up(x)))) + self.beside(x)


class Base(nn.Module):
    """x (batch, 5) -> (batch, 2), of more units than a drive's buffers hold; one is frozen whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(5))
        self.middle = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(self.middle(x)))


FROZEN = [name for name, parameter in Base().named_parameters() if not parameter.requires_grad]


def state_on(
    tier: str, directory: str, *more: str, unset: bool = False, saved: Literal["all", "trained"] = "all"
) -> tuple[TrainState, Plan]:
    """`unset`: somebody else brings the values."""
    tier_of = (f"offload.tier={DRIVE if tier == HOST else tier}", "offload.sub_group_parameters=1")
    run = run_of(*tier_of, "sharding.strategy=full_shard", f"run.dir={directory}", *more)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard_on(tier, meta(Base), plan, unset=unset)
    return TrainState(model, build_optimizer(model, plan), data=Pairs(), saved=saved), plan


def write_weights(directory: Path, *, without: str = "none") -> str:
    """Writes frozen parameters with other values than a run begins with."""
    base = dict(Base().named_parameters())
    names = [name for name in FROZEN if not name.startswith(without)]
    save_file({name: torch.randn(base[name].shape) for name in names}, directory / "model.safetensors")
    return str(directory)


def frozen(bits: Bits) -> Bits:
    return {name: bits[f"model.{name}"] for name in FROZEN}


def trained_on(tier: str, directory: str, *more: str) -> tuple[list[float], Bits, int, bool]:
    """Losses, this rank's bits, bytes of the frozen shards on the device, and whether they have values."""
    state, plan = state_on(tier, directory, *more)
    losses = advance(state, plan, to=3)
    unchanged = [p for p in state.model.parameters() if not p.requires_grad]
    on_device = all(not local_tensor(p).isnan().any() for p in unchanged)
    return losses, local_bits(state), storage_bytes_of_tensors(local_tensor(p) for p in unchanged), on_device


STRATEGIES = {
    1: "sharding.strategy=full_shard",
    2: "sharding.strategy=shard_grad_op",
    3: "sharding.strategy=full_shard",
    4: "sharding.strategy=zero1",
}


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))])
@pytest.mark.parametrize(
    "more",
    [
        ("precision.mode=bf16",),
        pytest.param(
            ("precision.mode=bf16_pure", "offload.sub_group_parameters=99999"), marks=pytest.mark.long
        ),
    ],
)
def test_offloaded_base_changes_no_bit(n: int, more: tuple[str, ...], ranks: Any, tmp_path: Path) -> None:
    """And kept bit for bit, in fp32 too where it is computed in bf16."""
    more = (*more, STRATEGIES[n])
    expected = ranks(n).run(trained_on, "none", "none", *more)
    assert all(on_device for *_, on_device in expected)
    for tier in (DRIVE, HOST):
        for offloaded, plain in zip(
            ranks(n).run(trained_on, tier, f"{tmp_path}/{tier}", *more), expected, strict=True
        ):
            assert offloaded[0] == plain[0]
            assert same_bits(offloaded[1], plain[1])
            assert offloaded[2] < plain[2] / 10  # an element of each stands for it
            assert not offloaded[3]


def saved_and_loaded(
    tier: str, directory: str, saved: Literal["all", "trained"] = "all"
) -> tuple[Bits, Bits, Bits, list[float], list[float]]:
    """Bits when saved, of another seed before it loads, and after; and the losses of both after it."""
    state, plan = state_on(tier, f"{directory}/one", saved=saved)
    advance(state, plan, to=2)
    save(state, f"{directory}/checkpoints", plan=plan)
    to, seed = "none" if tier == HOST else DRIVE, "run.seed=7"
    other, other_plan = state_on(to, f"{directory}/two", seed, saved=saved)
    before = local_bits(other)
    load(other, f"{directory}/checkpoints")
    after = local_bits(other)
    return local_bits(state), before, after, advance(state, plan, to=4), advance(other, other_plan, to=4)


@pytest.mark.parametrize("tier", [DRIVE, HOST, pytest.param("none", marks=pytest.mark.long)])
def test_a_checkpoint_brings_the_base_to_wherever_it_is(tier: str, ranks: Any, tmp_path: Path) -> None:
    for saved, before, after, losses, on in ranks(2).run(saved_and_loaded, tier, str(tmp_path)):
        assert not same_bits(frozen(before), frozen(saved))
        assert same_bits(after, saved)
        assert losses == on


def test_a_checkpoint_of_adapters_alone_leaves_the_base_as_it_is(ranks: Any, tmp_path: Path) -> None:
    for saved, before, after, losses, on in ranks(2).run(saved_and_loaded, DRIVE, str(tmp_path), "trained"):
        assert saved.keys().isdisjoint(f"model.{name}" for name in FROZEN)
        assert not same_bits(before, saved)
        assert same_bits(after, saved)
        assert losses != on


def computed(state: TrainState) -> Tensor:
    with torch.no_grad():
        return state.model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).clone()


def imported(tier: str, directory: str) -> tuple[Bits, Tensor]:
    state, plan = state_on(tier, f"{directory}/{tier}", unset=True)
    load_pretrained(state.model, directory, plan=plan)
    return local_bits(state), computed(state)


def test_weights_are_read_into_a_base_wherever_it_is(ranks: Any, tmp_path: Path) -> None:
    write_weights(tmp_path)
    expected = ranks(3).run(imported, "none", str(tmp_path))
    for tier in (DRIVE, HOST):
        for offloaded, plain in zip(ranks(3).run(imported, tier, str(tmp_path)), expected, strict=True):
            assert same_bits(offloaded[0], plain[0])
            assert torch.equal(offloaded[1], plain[1])


def resume_on_weights(directory: str) -> tuple[int, bool, list[float], list[float]]:
    """Returns where a run on weights resumes without a checkpoint, whether bitwise, and both runs' losses."""

    def started(name: str) -> tuple[TrainState, Plan]:
        state, plan = state_on(DRIVE, f"{directory}/{name}", unset=True)
        restore_train_state(
            state, plan, weights=Path(directory), saved=f"{directory}/saved", must_resume=False
        )
        return state, plan

    state, plan = started("run")
    advance(state, plan, to=2)
    bits = local_bits(state)
    close_offloaded_state(state.model, plan=plan, finished=False)
    again, plan = started("run")
    step, same = again.step, same_bits(local_bits(again), bits)
    losses = advance(again, plan, to=4)
    undisturbed, plan = started("other")
    return step, same, losses, advance(undisturbed, plan, to=4)[2:]


def test_run_on_weights_resumes_from_its_drive(ranks: Any, tmp_path: Path) -> None:
    """Which a tier does not keep, since no step changes them."""
    write_weights(tmp_path)
    for step, same, losses, undisturbed in ranks(2).run(resume_on_weights, str(tmp_path)):
        assert (step, same) == (2, True)
        assert losses == undisturbed


def without_values(tier: str, directory: str) -> tuple[int, list[str]]:
    """Bytes written, and what is said of a gather, a step and a save, where no values have come yet."""
    written: list[int] = []

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        written.append(sum(buffer.nbytes for buffer in buffers))
        return SYSTEM.pwritev(descriptor, buffers, offset)

    run = run_of(f"offload.tier={tier}", f"run.dir={directory}")
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    settings = offload_settings(plan, replace(SYSTEM, pwritev=pwritev))
    model = shard(meta(Base), plan, init="none", offload=settings)
    state, said = TrainState(model, build_optimizer(model, plan)), list[str]()
    for use in (lambda: computed(state), state.optimizer.step, state.tensors):
        with pytest.raises(OffloadError) as info:
            use()
        said.append(str(info.value))
    return sum(written), said


@pytest.mark.parametrize("tier", [DRIVE, pytest.param("optimizer:nvme", marks=pytest.mark.long)])
def test_unset_parameters_are_neither_written_nor_used(tier: str, ranks: Any, tmp_path: Path) -> None:
    (result,) = ranks(1).run(without_values, tier, str(tmp_path))
    written, said = result
    assert written < PAGE_BYTES  # a manifest
    assert all("no values yet" in text for text in said)


def resume_from_damage(directory: str, weights: str | None) -> tuple[int, list[float], list[float]]:
    """Returns the step and losses of a run whose kept step is damaged while it starts, and other losses."""

    def made(name: str) -> tuple[TrainState, Plan]:
        return state_on(DRIVE, f"{directory}/{name}", unset=weights is not None)

    def start(state: TrainState, plan: Plan) -> list[float]:
        base = Path(weights) if weights else None
        restore_train_state(state, plan, weights=base, saved=f"{directory}/saved", must_resume=False)
        begun.append(state.step)
        return advance(state, plan, to=state.step + 2)

    begun: list[int] = []
    state, plan = made("run")
    undisturbed = start(state, plan)
    close_offloaded_state(state.model, plan=plan, finished=False)
    again, plan = made("run")
    if dist.get_rank() == 0:
        for path in Path(directory).glob("run/offload/*/rank-00000/state-*.data"):
            damage(path)
    dist.barrier()
    return begun[-1], start(again, plan), undisturbed


def damage(path: Path) -> None:
    changed = bytearray(path.read_bytes())
    for at in range(64, len(changed), 4096):
        changed[at] ^= 1
    path.write_bytes(changed)


@pytest.mark.parametrize("has_weights", [True, pytest.param(False, marks=pytest.mark.long)])
def test_damaged_generation_is_not_used_at_the_start(has_weights: bool, ranks: Any, tmp_path: Path) -> None:
    weights = write_weights(tmp_path) if has_weights else None
    for step, losses, undisturbed in ranks(2).run(resume_from_damage, str(tmp_path), weights):
        assert step == 0
        assert losses == undisturbed


def resume_with_another_seed(directory: str) -> tuple[int, bool]:
    """Returns where a run with another seed resumes, and whether bitwise."""
    state, plan = state_on(DRIVE, directory)
    advance(state, plan, to=2)
    save(state, f"{directory}/saved", plan=plan)
    advance(state, plan, to=3)
    bits = local_bits(state)
    close_offloaded_state(state.model, plan=plan, finished=False)
    again, plan = state_on(DRIVE, directory, "run.seed=7")
    restore_train_state(again, plan, weights=None, saved=f"{directory}/saved", must_resume=True)
    return again.step, same_bits(local_bits(again), bits)


def test_run_resumes_from_its_drive_with_the_base_of_its_checkpoint(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(resume_with_another_seed, str(tmp_path)) == [(3, True)] * 2


def loaded_twice(tier: str, directory: str) -> Tensor:
    """Imports twice, of which the first fails and leaves nothing to compute with."""
    state, plan = state_on(tier, f"{directory}/{tier}", unset=True)

    def init(module: nn.Module) -> None:
        if module is state.model.get_submodule(LACKING):
            raise EOFError("nothing more comes")
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(EOFError):
        load_pretrained(state.model, directory, plan=plan, init=init)
    for use in (lambda: computed(state), state.tensors):
        with pytest.raises(OffloadError, match="loaded in part"):
            use()
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    load_pretrained(state.model, directory, plan=plan)
    return computed(state)


LACKING = "layers.3.up"


@pytest.mark.parametrize("tier", [DRIVE, pytest.param(HOST, marks=pytest.mark.long)])
def test_an_import_that_broke_off_can_be_repeated(tier: str, ranks: Any, tmp_path: Path) -> None:
    write_weights(tmp_path, without=LACKING)
    ((_, expected),) = ranks(1).run(imported, tier, str(tmp_path))
    (outputs,) = ranks(1).run(loaded_twice, tier, str(tmp_path))
    assert torch.equal(outputs, expected)


class Tables(Regression):
    """With a frozen table of integers in each layer, and one of truth values."""

    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            table = torch.arange(WIDTH * 3, dtype=torch.int8).view(WIDTH, 3) + i
            layer.table = nn.Parameter(table, requires_grad=False)
            layer.mask = nn.Parameter(table % 2 == 0, requires_grad=False)
            layer.register_forward_pre_hook(
                lambda own, given: (given[0] + own.table.sum() * own.mask.sum() / 999,)
            )


def trained_with_tables(tier: str, directory: str) -> tuple[list[float], Bits]:
    run = run_of(
        "precision.mode=bf16", f"offload.tier={DRIVE if tier == HOST else tier}", f"run.dir={directory}"
    )
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard_on(tier, Tables(), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Pairs())
    losses = [step.loss for step in train(state, plan, loss=mean_square)]
    return losses, local_bits(state)


def shards_integers() -> bool:
    layer = nn.Module()
    layer.table = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    try:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    except RuntimeError:  # "only Tensors of floating point dtype can require gradients"
        return False
    return True


def refusal_of_integers() -> str:
    with pytest.raises(ShardError) as raised:
        shard(Tables(), Plan.from_run(run_of(), world_size=1))
    return str(raised.value)


def test_integers_are_frozen_outside_as_well(ranks: Any, tmp_path: Path) -> None:
    if ranks(1).run(shards_integers) == [False]:
        assert "cannot shard the integer parameters of layers.0" in ranks(1).run(refusal_of_integers)[0]
        pytest.skip("this torch cannot shard parameters of integers")
    expected = ranks(2).run(trained_with_tables, "none", "none")
    for tier in (DRIVE, HOST):
        offloaded = ranks(2).run(trained_with_tables, tier, f"{tmp_path}/{tier}")
        for plain, other in zip(offloaded, expected, strict=True):
            assert plain[0] == other[0]
            assert same_bits(plain[1], other[1])
