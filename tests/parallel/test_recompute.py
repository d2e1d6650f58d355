"""Recompute repeats what its mode says, and changes no number."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import ShardError
from fullshard.parallel.materialize import materialize
from fullshard.parallel.recompute import apply_activation_offload, apply_recompute
from fullshard.spec.settings.train_section import RecomputeSection
from tests.fakes.architectures import WIDTH, Block, loss_of, on_meta, tokens_of
from tests.parallel.operations import CountOperations

BLOCKS = 4
MODES = ("none", "full", "selective", "offload")


class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(super().forward(x))


def apply(model: nn.Module, section: RecomputeSection, *, compiled: bool = False) -> None:
    apply_recompute(list(model), section, compiled=list(model) if compiled else ())
    apply_activation_offload(list(model), section, device="cpu")


def step(model: nn.Module, mode: str, *, compiled: bool = False) -> tuple[Counter[str], list[Tensor]]:
    """The operations of a forward and backward, and the gradients."""
    apply(model, RecomputeSection(mode=mode), compiled=compiled)
    torch.manual_seed(3)
    with CountOperations() as counting:
        model(torch.ones(5, WIDTH, requires_grad=True)).square().sum().backward()
    return counting.counts, [parameter.grad for parameter in model.parameters()]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(BLOCKS)))


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("none", [1, 1, 1, 1]),
        ("full", [2, 2, 2, 2]),
        ("selective", [2, 2, 2, 2]),
        ("offload", [1, 1, 1, 1]),
    ],
)
def test_only_full_and_selective_recompute_run_blocks_twice(mode: str, calls: list[int]) -> None:
    model = blocks()
    step(model, mode)
    assert [block.calls for block in model] == calls


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_those_without_recompute(mode: str) -> None:
    model = blocks()
    _, plain = step(copy.deepcopy(model), "none")
    _, again = step(model, mode)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_repeats_elementwise_work_and_no_matmul(compiled: bool) -> None:
    counts = {mode: step(blocks(), mode, compiled=compiled)[0] for mode in MODES}
    assert counts["selective"]["aten::addmm"] == counts["none"]["aten::addmm"] == 2 * BLOCKS
    assert counts["full"]["aten::addmm"] > 2 * BLOCKS
    assert counts["selective"]["aten::tanh"] == counts["full"]["aten::tanh"] == 2 * BLOCKS
    assert counts["none"]["aten::tanh"] == BLOCKS


class Statistics(Block):
    """Normalises by statistics that its forward changes before they are used, as codebooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().std() * 4, 0.5)
            self.made = self.scale + (2 if self.made is None else self.made)  # a new tensor each time
        return super().forward(self.norm(x) / self.scale * self.made)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_forward_has_the_buffers_of_the_first_and_changes_none(mode: str) -> None:
    """Two forwards come before a backward; of full recompute, the graph of the first is used twice."""
    torch.manual_seed(0)
    plain = nn.Sequential(Statistics(), Statistics())
    model = copy.deepcopy(plain)
    apply_recompute(list(model), RecomputeSection(mode=mode))
    x, found = torch.randn(5, WIDTH), []
    for one in (plain, model):
        buffers = {name: one.get_buffer(name) for name in ("0.scale", "1.norm.running_mean")}
        losses = [one(x).square().sum()]
        if one is model:
            losses.append(one(2 * x).square().sum())
        for _ in range(2 if mode == "full" else 1):
            losses[0].backward(retain_graph=True)
        if one is plain:  # where autograd does not keep the scale of the first
            losses.append(one(2 * x).square().sum())
        losses[1].backward()
        assert all(one.get_buffer(name) is buffer for name, buffer in buffers.items())
        found.append([*(parameter.grad for parameter in one.parameters()), *one.buffers()])
    for expected, tensor in zip(*found, strict=True):
        torch.testing.assert_close(tensor, expected)


def test_every_other_matmul_may_be_saved() -> None:
    """The first, third, fifth and seventh of a decoder's block; the last is never needed again."""
    counts: dict[int, int] = {}
    for save in (1, 2, 100):
        model = materialize(on_meta("decoder"), seed=0)
        apply_recompute(list(model.blocks), RecomputeSection(mode="selective", save_matmuls=save))
        with CountOperations() as counting:
            loss_of(model, tokens_of(0)).backward()
        counts[save] = sum(counting.counts[f"aten::{name}"] for name in ("mm", "addmm", "bmm"))
        counts[-save] = len(model.blocks)
    assert counts[2] - counts[1] == 3 * counts[-2]
    assert counts[100] - counts[2] == 2 * counts[-2]


def test_selective_saves_attention() -> None:
    model = materialize(on_meta("decoder"), seed=0)
    apply_recompute(list(model.blocks), RecomputeSection(mode="selective"))
    with CountOperations() as counting:
        loss_of(model, tokens_of(0)).backward()
    (attention,) = {
        name for name in counting.counts if "scaled_dot_product" in name and "backward" not in name
    }
    assert counting.counts[attention] == len(model.blocks)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        y += x
        return torch.tanh(y)


def test_in_place_change_of_selectively_saved_tensors_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has been mutated"):
        step(nn.Sequential(InPlace(), InPlace()), "selective")


@pytest.mark.parametrize(
    ("mode", "settings", "taken"),
    [
        ("offload", {}, [0, 1, 2, 3]),
        ("full", {"blocks": 3}, [0, 1, 2]),
        ("selective", {"blocks": 1}, [0]),
    ],
)
def test_requested_blocks_recompute(mode: str, settings: dict[str, int], taken: list[int]) -> None:
    model = blocks()
    forwards = [block.forward for block in model]
    apply(model, RecomputeSection(mode=mode, **settings))
    changed = [at for at, block in enumerate(model) if block.forward != forwards[at]]
    assert changed == taken


def test_more_recomputed_blocks_than_blocks_are_refused() -> None:
    with pytest.raises(ShardError, match="only 4 of 5 blocks"):
        apply_recompute(list(blocks()), RecomputeSection(mode="full", blocks=5))


def test_states_of_generators_are_kept_for_blocks_that_may_draw_numbers() -> None:
    decoder = materialize(on_meta("decoder"), seed=0)
    for model, kept in ((decoder.blocks, False), (blocks(), True)):
        apply_recompute(list(model), RecomputeSection(mode="full"))
        assert [one.forward.keywords["preserve_rng_state"] for one in model] == [kept] * len(model)


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_names_in_the_state_dict_stay(mode: str) -> None:
    model = blocks()
    names = list(model.state_dict())
    apply(model, RecomputeSection(mode=mode))
    assert list(model.state_dict()) == names
