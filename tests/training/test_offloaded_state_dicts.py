"""The state dict of an optimizer whose state is outside: it is loaded, kept and filed as torch's own is."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import OffloadError, SpecError
from fullshard.offload.drive_store import GROUP_BUFFERS
from fullshard.offload.lazy_tensor import RereadingTensor, make_lazy_tensor
from fullshard.offload.state import find_offloaded_state
from fullshard.training.state import TrainState
from tests.training.runs import BATCH, local_bits, mean_square, pairs, run_of, same_bits, sharded
from tests.training.test_offloaded import TIERS, TINY, Odd

AT, LATER, END = 3, 5, 7
DRIVES = TIERS[2:]
Bits = dict[str, Tensor]


def state_on(tier: str, directory: str, *more: str) -> TrainState:
    """Of more groups than a drive's buffers, with parameters that are cut over them."""
    state, _ = sharded(run_of(f"offload.tier={tier}", f"run.dir={directory}", TINY, *more), model=Odd)
    offloaded = find_offloaded_state(state.model)
    if offloaded is not None:
        assert len(offloaded.groups) > GROUP_BUFFERS
        assert any(one.begin for group in offloaded.groups for one in group.segments)
    return state


def advance(state: TrainState, begin: int, end: int) -> None:
    """A loop that knows of no generations."""
    for step in range(begin, end):
        mean_square(state.model, pairs(step, BATCH)).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def living_found(tier: str, directory: str) -> list[Bits]:
    """This rank's bits at the end of runs that load nothing, what is there, and what was there earlier."""
    found: list[Bits] = []
    for taken, loaded in ((None, None), (AT, AT), (AT, LATER)):
        state = state_on(tier, f"{directory}/{tier}-{loaded}")
        advance(state, 0, taken or AT)
        state_dict = state.optimizer.state_dict()
        advance(state, AT, loaded or AT)
        if loaded:
            for _ in range(2):
                before = local_bits(state)
                state.optimizer.load_state_dict(state_dict)
                assert same_bits(local_bits(state), before)
        advance(state, loaded or AT, END)
        found.append(local_bits(state))
    return found


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_load_of_what_is_there_changes_nothing(n: int, ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Whenever the dict was taken: what is there counts. The run goes on as one without a tier."""
    expected = [own[0] for own in ranks(n).run(living_found, "none", str(tmp_path))]
    for tier in TIERS:
        for found, own in zip(ranks(n).run(living_found, tier, str(tmp_path)), expected, strict=True):
            assert all(same_bits(bits, own) for bits in found)


def load_with_gain(state: TrainState, state_dict: dict[str, Any], *, gain: Tensor) -> None:
    """A scalar is not outside: as without a tier its value is the model's, not the optimizer's."""
    state.optimizer.load_state_dict(state_dict)
    with torch.no_grad():
        cast(Odd, state.model).gain.copy_(gain)


def gone_back(tier: str, directory: str, *more: str) -> list[list[Bits]]:
    """Pairs of this rank's bits that must be the same: after going back, and after training on."""
    found: list[list[Bits]] = []
    for i, kept in enumerate((copy.deepcopy, through_a_file)):
        state = state_on(tier, f"{directory}/{tier}-{i}", *more)
        advance(state, 0, AT)
        then, state_dict = local_bits(state), kept(state.optimizer.state_dict())
        gain = copy.deepcopy(cast(Odd, state.model).gain)
        advance(state, AT, END)
        later = local_bits(state)
        assert not same_bits(then, later)
        for _ in range(2):
            load_with_gain(state, state_dict, gain=gain)
            found.append([then, local_bits(state)])
            advance(state, AT, END)
            found.append([later, local_bits(state)])
    return found


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_copy_and_a_file_go_back_to_when_they_were_made(
    n: int, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """As often as one likes."""
    for tier in TIERS:
        for found in ranks(n).run(gone_back, tier, str(tmp_path)):
            assert all(same_bits(*both) for both in found), tier


def test_moments_in_bf16_and_other_orders_go_back_as_well(ranks: Callable[..., Any], tmp_path: Path) -> None:
    more = ("offload.moments=bf16",)
    for found in ranks(2).run(gone_back, "optimizer:nvme", str(tmp_path), *more):
        assert all(same_bits(*both) for both in found)


def broken_off(tier: str, directory: str) -> None:
    state = state_on(tier, directory)
    optimizer, x = state.optimizer, pairs(0)[0]
    advance(state, 0, AT)
    then, living = local_bits(state), optimizer.state_dict()
    good, gain = copy.deepcopy(living), copy.deepcopy(cast(Odd, state.model).gain)
    advance(state, AT, LATER)
    later = local_bits(state)

    def fail() -> Tensor:
        raise EOFError("the file ends here")

    bad = good | {"state": {i: dict(own) for i, own in good["state"].items()}}
    last = max(i for i, own in bad["state"].items() if "master" in own)
    shard = bad["state"][last]["exp_avg"].to_local()
    bad["state"][last]["exp_avg"] = make_lazy_tensor(shard.shape, shard.dtype, read=fail)
    with pytest.raises(EOFError):
        optimizer.load_state_dict(bad)
    for use in (optimizer.state_dict, optimizer.step, state.tensors):
        with pytest.raises(OffloadError, match="loaded in part"):
            use()
    with torch.no_grad(), pytest.raises(OffloadError, match="loaded in part"):
        state.model(x)
    for module in state.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    if tier in DRIVES:  # what was there is whole, but for what is not outside
        optimizer.load_state_dict(living)
        now, outside = local_bits(state), state.offloaded
        assert outside is not None
        assert all(torch.equal(now[name], later[name]) for name in outside.tensor_names)
    load_with_gain(state, good, gain=gain)
    assert same_bits(local_bits(state), then)
    advance(state, AT, LATER)
    assert same_bits(local_bits(state), later)


@pytest.mark.parametrize("tier", TIERS)
def test_a_load_that_is_broken_off_is_told_until_another_is_whole(
    tier: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    ranks(1).run(broken_off, tier, str(tmp_path))


def first_outside(state_dict: dict[str, Any]) -> int:
    return min(i for i, own in state_dict["state"].items() if "master" in own)


def of_others(tier: str, directory: str) -> list[str]:
    """What is said of a shard of another shape, one on meta, and a number; nothing has changed then."""
    state = state_on(tier, directory)
    advance(state, 0, AT)
    before, good = local_bits(state), copy.deepcopy(state.optimizer.state_dict())
    index = first_outside(good)
    own: DTensor = good["state"][index]["exp_avg"]
    told: list[str] = []
    for wrong in (torch.zeros(3, 2), torch.empty_like(own.to_local(), device="meta"), 3.0):
        bad = good | {"state": good["state"] | {index: good["state"][index] | {"exp_avg": wrong}}}
        with pytest.raises(SpecError) as raised:
            state.optimizer.load_state_dict(bad)
        told.append(raised.value.what)
        assert same_bits(local_bits(state), before)
    return told


@pytest.mark.parametrize("tier", ["optimizer:cpu", "optimizer:nvme"])
def test_shards_of_others_are_refused_before_anything_changes(
    tier: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    for told in ranks(2).run(of_others, tier, str(tmp_path)):
        assert len(told) == 3
        assert all("exp_avg of layers.0" in what for what in told)


def let_go(directory: str) -> None:
    state = state_on("optimizer:nvme", directory)
    advance(state, 0, AT)
    state_dict = state.optimizer.state_dict()
    living: DTensor = state_dict["state"][first_outside(state_dict)]["exp_avg"]
    assert isinstance(living.to_local(), RereadingTensor)
    living.to_local().cpu()
    offloaded = find_offloaded_state(state.model)
    assert offloaded is not None
    offloaded.close()
    with pytest.raises(OffloadError, match="no longer on its drive"):
        living.to_local().cpu()


def test_what_a_dict_has_of_a_drive_that_is_let_go_is_told(ranks: Callable[..., Any], tmp_path: Path) -> None:
    ranks(1).run(let_go, str(tmp_path))
