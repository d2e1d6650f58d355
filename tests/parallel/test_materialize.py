"""Values: the same at any rank count, strategy and unit policy; never more than one unit whole on a rank."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import ShardError
from fullshard.models.meta_init import ConstructorTape, construct_with_meta_parameters
from fullshard.observe.memory import measure_peak_memory, storage_bytes_of_tensors
from fullshard.parallel.materialize import materialize, parameters_on_meta
from fullshard.parallel.model_parameters import MissingWeightsWarning
from fullshard.training.shard import shard
from tests.fakes.architectures import WIDTH, Block, Encoder, on_meta, whole
from tests.fakes.plans import STRATEGIES, plan_of
from tests.fakes.sampling import sampled

SIZE = ("sharding.units.min_parameters=60",)


class Drawing(nn.Module):
    """Initialised in every way: by themselves, by a parent, orthogonally, from numpy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()  # MultiheadAttention's own _reset_parameters
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.square = nn.Parameter(torch.empty(WIDTH, 5))
        self.noise = nn.Parameter(torch.empty(3))
        self.scale = nn.Parameter(torch.empty(()))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
        if isinstance(module, Block):
            nn.init.orthogonal_(module.down.weight)
        if module is self:
            nn.init.orthogonal_(self.square)
            values = [*np.random.standard_normal(2), random.random()]
            self.noise.copy_(torch.tensor(values))
            nn.init.uniform_(self.scale)


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return Drawing() if name == "drawing" else on_meta(name)


def sharded_values(name: str, *settings: str) -> dict[str, Tensor]:
    model = shard(build(name), plan_of(dist.get_world_size(), *settings))
    return {key: whole(parameter.detach()) for key, parameter in model.named_parameters()}


def check_values(name: str, ranks: Any, world_size: int, *settings: str) -> None:
    expected = dict(materialize(build(name), seed=0).named_parameters())
    for values in ranks(world_size).run(sharded_values, name, *settings):
        assert values.keys() == expected.keys()
        for key, parameter in expected.items():
            assert torch.equal(values[key], parameter), key


@pytest.mark.parametrize("world_size", sampled([1, 2, 3, 4], here=[1, 3]))
def test_values_are_the_same_on_any_number_of_ranks(world_size: int, ranks: Any) -> None:
    check_values("drawing", ranks, world_size)


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, here=["no_shard", "full_shard", "hybrid_shard"]))
def test_values_are_the_same_in_any_strategy(strategy: str, ranks: Any) -> None:
    check_values("drawing", ranks, 4, *STRATEGIES[strategy])


@pytest.mark.parametrize("name", ["drawing", "odd_mixture", "shared_weight"])
def test_values_are_the_same_in_any_units(name: str, ranks: Any) -> None:
    check_values(name, ranks, 2, *SIZE)


def test_values_depend_on_seed_and_module() -> None:
    first, again, other = (dict(materialize(build("drawing"), seed=s).named_parameters()) for s in (0, 0, 1))
    assert torch.equal(first["square"], again["square"])
    assert not torch.equal(first["square"], other["square"])
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])


def test_initialising_leaves_the_random_state_as_it_was() -> None:
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    materialize(build("drawing"), seed=0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_parent_refines_initial_values_of_children() -> None:
    down = materialize(build("drawing"), seed=0).blocks[0].down.weight
    torch.testing.assert_close(
        down @ down.T, torch.eye(WIDTH)
    )  # orthogonal, over what trunc_normal_ had drawn


def test_a_weight_norm_gets_the_values_of_the_plain_weight() -> None:
    """Its initialiser writes into a weight that is computed from two other parameters."""
    with torch.device("meta"):
        plain, normed = (nn.Sequential(nn.Linear(4, 3)) for _ in range(2))
        nn.utils.parametrizations.weight_norm(normed[0])
    plain, normed = materialize(plain, seed=0), materialize(normed, seed=0)
    torch.testing.assert_close(normed[0].weight, plain[0].weight)
    assert torch.equal(normed[0].bias, plain[0].bias)


def test_init_replaces_initialisers_of_modules(ranks: Any) -> None:
    for first, bias in ranks(2).run(values_by_init):
        assert (first == 0.5).all()
        assert (bias == 0.5).all()


def values_by_init() -> tuple[Tensor, Tensor]:
    def halves(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    model = shard(on_meta("vit"), plan_of(2), init=halves)
    return whole(model.class_token.detach()), whole(model.patches.bias.detach())


class Copying(nn.Module):
    """A momentum encoder: starts as a copy of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(Block(), Block()) for _ in range(2))

    def reset_parameters(self) -> None:
        for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            one.copy_(other)


class Bare(nn.Module):
    def __init__(self, *, replaced: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register = nn.Parameter(torch.empty(2, 3))
        if replaced:
            self.reset_parameters = self._replace

    def _replace(self) -> None:
        self.register = nn.Parameter(torch.full((2, 3), 7.0))


def shard_on_meta(kind: str) -> Tensor | None:
    with torch.device("meta"):
        model = {"bare": Bare, "copying": Copying, "replaced": lambda: Bare(replaced=True)}[kind]()
    shard(model, plan_of(1))
    return whole(model.register.detach())


@pytest.mark.parametrize(
    ("kind", "message"),
    [("bare", "register was not initialised"), ("copying", "cannot be initialised unit by unit")],
)
def test_parameters_without_initialiser_are_refused(kind: str, message: str, ranks: Any) -> None:
    with pytest.raises(ShardError, match=message):
        ranks(1).run(shard_on_meta, kind)


def test_an_initialiser_may_replace_the_parameter(ranks: Any) -> None:
    (value,) = ranks(1).run(shard_on_meta, "replaced")
    assert (value == 7.0).all()


# Memory #
def peak_and_parts(kind: str) -> tuple[int, int, int]:
    """(peak while sharding, bytes of the shards, bytes of the largest unit when whole), 12 equal blocks."""
    layers, width, rank = 12, 192, dist.get_rank()
    weights_here = kind == "on every rank" or (kind == "on rank 0" and rank == 0)
    with torch.device("cpu" if weights_here else "meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))
        )
    plan = plan_of(dist.get_world_size(), *(["precision.mode=bf16_pure"] if kind == "pure" else []))
    with measure_peak_memory(torch.device("cpu")) as peak:
        shard(model, plan)
    unit = 2 * (width * width + width) * 4
    return peak.bytes, storage_bytes_of_tensors(p.detach() for p in model.parameters()), unit


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["meta", "pure"])
def test_peak_of_initialising_is_shards_and_one_unit(kind: str, world_size: int, ranks: Any) -> None:
    for peak, shards, unit in ranks(world_size).run(peak_and_parts, kind):
        assert 12 * unit / world_size == shards * (2 if kind == "pure" else 1)
        assert shards < peak <= (shards + unit) * 1.01


@pytest.mark.parametrize("kind", ["on rank 0", "on every rank"])
def test_peak_of_scattering_is_shards_and_one_parameter(kind: str, ranks: Any) -> None:
    """Beside what was there before; rank 0 gives from what it has."""
    first, *others = ranks(4).run(peak_and_parts, kind)
    for peak, shards, unit in others:
        assert shards < peak <= (shards + unit / 2) * 1.01
    peak, shards, _ = first
    assert peak <= shards * 1.01


# Values that are there #
class Weighted(nn.Module):
    """A frozen bf16 block, a trained bf16 block, a trained fp32 one, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block().bfloat16(), Block().bfloat16(), Block()])
        self.blocks[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.ones_(self.scale)


def weighted(held: str) -> nn.Module:
    """`held`: everyone | rank 0 | rank 1 | partly (the middle block is on the meta device)."""
    rank = dist.get_rank()
    if held in ("rank 0", "rank 1") and held != f"rank {rank}":
        with torch.device("meta"):
            return Weighted()
    model = Weighted()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.full_like(tensor, 1.0 + rank))
    if held == "partly":
        model.blocks[1] = model.blocks[1].to("meta")
    return model


def given_values(held: str, *settings: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        if held == "partly":
            warnings.simplefilter("ignore", MissingWeightsWarning)
        model = shard(weighted(held), plan_of(dist.get_world_size(), *settings))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor.detach()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("held", ["everyone", "rank 0"])
def test_all_ranks_get_the_values_of_rank_0(held: str, ranks: Any) -> None:
    for values in ranks(3).run(given_values, held):
        assert {name for name, value in values.items() if not (value == 1.0).all()} == set()


def test_missing_values_are_initialised_and_others_are_rank_0s(ranks: Any) -> None:
    one, two = ranks(2).run(given_values, "partly")
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert (value == 1.0).all() == (not name.startswith("blocks.1") or name == "blocks.1.norm.weight")
    assert (one["blocks.1.norm.bias"] == 0.0).all()


def warned(held: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(weighted(held), plan_of(dist.get_world_size()))
    return [str(w.message) for w in caught if w.category is MissingWeightsWarning and w.filename == __file__]


def test_rank_0_warns_of_missing_weights(ranks: Any) -> None:
    text = (
        "6 of 19 parameters hold no values, and are initialised: "
        "blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.up.weight, blocks.1.up.bias and 2 more"
    )
    assert ranks(2).run(warned, "partly") == [[text], []]
    assert ranks(2).run(warned, "everyone") == [[], []]


def test_trained_parameters_get_the_master_dtype(ranks: Any) -> None:
    for mode, master in (("fp32", torch.float32), ("bf16", torch.float32), ("bf16_pure", torch.bfloat16)):
        (values,) = ranks(1).run(given_values, "everyone", f"precision.mode={mode}")
        assert {v.dtype for name, v in values.items() if name.startswith("blocks.0")} == {torch.bfloat16}
        trained = {n: v.dtype for n, v in values.items() if n.startswith(("blocks.1", "blocks.2", "scale"))}
        assert set(trained.values()) == {master}


def other_models(kind: str) -> None:
    with torch.device("meta"):
        model = Bare()
        if dist.get_rank() == 1:
            if kind == "shape":
                model.blocks[1].up = nn.Linear(WIDTH, 2)
            elif kind == "frozen":
                model.register.requires_grad_(False)
            elif kind == "missing":
                del model.register
            else:
                model.extra = nn.Parameter(torch.empty(1))
        elif kind == "dtype":
            model.register = nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16))
    shard(model, plan_of(2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"blocks.1.up.weight: shape \(2, 8\), trained on this rank, shape \(24, 8\)"),
        (
            "frozen",
            r"rank 1 holds another model(.|\n)*register: shape [^\n]*frozen, torch.float32 on this rank",
        ),
        ("missing", "register: nothing on this rank"),
        ("extra", "extra: shape [^\n]* on this rank, nothing on rank 0"),
    ],
)
def test_ranks_with_different_models_are_refused(kind: str, message: str, ranks: Any) -> None:
    with pytest.raises(ShardError, match=message):
        ranks(2).run(other_models, kind)


def test_weights_on_another_rank_alone_are_refused(ranks: Any) -> None:
    with pytest.raises(ShardError, match="rank 1 holds weights that rank 0 does not"):
        ranks(2).run(given_values, "rank 1")


# Buffers #
class Buffered(nn.Module):
    """Statistics, a mask, and a table that modules share, computed when they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool).triu())
        self.register_buffer("alias", self.table)
        for block in self.blocks:
            block.register_buffer("shared", self.table)


class Table(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_buffers(self) -> None:
        self.table.copy_(torch.arange(4.0))


def buffers_of(built: str, *settings: str) -> tuple[dict[str, Tensor], bool]:
    if built == "meta":
        with torch.device("meta"):
            model: nn.Module = nn.Sequential(Table(), Table(), nn.BatchNorm1d(WIDTH))
    else:
        with parameters_on_meta():
            model = Buffered()
    shard(model, plan_of(dist.get_world_size(), *settings))
    shared = built == "meta" or model.blocks[0].shared is model.blocks[1].shared is model.table is model.alias
    return dict(model.named_buffers(remove_duplicate=False)), shared


def test_buffers_are_those_of_a_normally_built_module(ranks: Any) -> None:
    for built, normal in (
        ("meta", nn.Sequential(Table(), Table(), nn.BatchNorm1d(WIDTH))),
        ("parameters_on_meta", Buffered()),
    ):
        expected = dict(normal.named_buffers(remove_duplicate=False))
        for buffers, shared in ranks(2).run(buffers_of, built):
            assert buffers.keys() == expected.keys()
            for name, buffer in expected.items():
                assert torch.equal(buffers[name], buffer), name
            assert shared


def shard_with_lost_buffer(name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Table(), Table(), Block())
        model.get_submodule(name.rpartition(".")[0]).register_buffer("lost", torch.zeros(2))
    shard(model, plan_of(1))


@pytest.mark.parametrize("name", ["lost", "2.lost", "1.lost"])  # of modules without reset_buffers, and with
def test_a_buffer_that_nothing_computes_again_is_refused(name: str, ranks: Any) -> None:
    with pytest.raises(ShardError, match=f"^{name} is a buffer on the meta device"):
        ranks(1).run(shard_with_lost_buffer, name)


class SpectralBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.up)


def spectral_blocks() -> nn.Module:
    def construct() -> nn.Module:
        with torch.device("cpu"):
            return nn.Sequential(SpectralBlock(), SpectralBlock())

    return construct_with_meta_parameters(construct, tape=ConstructorTape())


def shard_spectral_blocks() -> dict[str, Tensor]:
    model = shard(spectral_blocks(), plan_of(dist.get_world_size()))
    return {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}


def test_spectral_norms_of_several_units_keep_the_constructors_estimates(ranks: Any) -> None:
    expected = materialize(spectral_blocks(), seed=0).state_dict()
    for values in ranks(2).run(shard_spectral_blocks):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert all(tensor.isfinite().all() for tensor in values.values())


def test_spectral_norm_on_meta_is_refused_with_a_fix() -> None:
    with torch.device("meta"):
        model = SpectralBlock()
    with pytest.raises(ShardError, match=r"0\._u is a buffer on the meta device(.|\n)*model on the CPU"):
        materialize(model, seed=0)


def test_parameters_on_meta_keeps_ties_and_ends_with_its_block() -> None:
    with parameters_on_meta():
        model = nn.Module()
        model.one, model.two = nn.Linear(2, 2), nn.Linear(2, 2)
        model.two.weight = model.one.weight
        model.two.bias.requires_grad_(False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.two.weight is model.one.weight
    assert not nn.Linear(2, 2).weight.is_meta


class HoldsBufferTwice(nn.Sequential):
    """A buffer that is an attribute of another module, and of which another buffer is a view."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("table", torch.full((WIDTH,), float(dist.get_rank())))
        self.register_buffer("part", self.table[1:])
        vars(self[0])["table"] = self.table


def buffers_after_a_change() -> list[float]:
    model = HoldsBufferTwice()
    shard(model, plan_of(dist.get_world_size(), *SIZE))
    found = [float(model.table.sum())]
    model.table.add_(1)
    return [*found, float(model.part.sum()), float(model[0].table.sum())]


def test_attributes_and_views_of_a_buffer_see_its_changes_after_shard(ranks: Any) -> None:
    assert ranks(2).run(buffers_after_a_change) == [[0.0, WIDTH - 1.0, WIDTH]] * 2
