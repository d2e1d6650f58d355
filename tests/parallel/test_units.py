"""Every parameter in exactly one unit, and the units where the model repeats."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard.errors import ShardError
from fullshard.parallel.units import ROOT, Unit, find_recompute_and_compile_blocks, find_units
from fullshard.spec.run import UnitSection
from tests.fakes.architectures import ARCHITECTURES, WIDTH, Block, Encoder, Repeating, on_meta

POLICIES: dict[str, dict[str, Any]] = {"block": {}, "size": {"min_parameters": 60}}


def units_of(model: nn.Module, **section: Any) -> dict[str, Unit]:
    return {unit.name: unit for unit in find_units(model, UnitSection(**section))}


def check_partition(model: nn.Module, units: list[Unit]) -> None:
    """Each parameter is in one unit, and the engine will find it there: all that hold it lie in the unit's
    modules, and in no unit that is sharded before."""
    assert units[-1].modules == (model,)
    assert len({unit.name for unit in units}) == len(units)
    names = [name for unit in units for name in unit.parameters]
    sharded = {name for name, parameter in model.named_parameters() if parameter.ndim > 0}
    assert sorted(names) == sorted(sharded)
    managed: set[int] = set()
    taken: set[nn.Module] = set()
    for unit in units:  # as the engine goes through them
        assert not taken & set(unit.modules)
        taken |= set(unit.modules)
        below = [m for top in unit.modules for m in reachable(top, stop=taken - set(unit.modules))]
        new = {id(p) for m in below for p in m.parameters(recurse=False) if p.ndim > 0}
        assert not new & managed, f"{unit.name} holds a parameter of an earlier unit"
        assert new == {id(p) for p in unit.parameters.values()}
        managed |= new


def reachable(module: nn.Module, *, stop: set[nn.Module]) -> list[nn.Module]:
    children = [child for child in module.children() if child not in stop]
    return [module, *(below for child in children for below in reachable(child, stop=stop))]


@pytest.mark.parametrize("section", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_in_exactly_one_unit(name: str, section: dict[str, Any]) -> None:
    model = on_meta(name)
    check_partition(model, find_units(model, UnitSection(**section)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder", "embedding blocks.0 blocks.1 norm+head (root)"),
        ("tied_decoder", "blocks.0 blocks.1 (root)"),
        ("one_layer", "embedding blocks.0 norm+head (root)"),
        ("odd_mixture", "embedding layers.0 layers.1 layers.2 norm+head (root)"),
        ("encoder", "embedding encoder.layers.0 encoder.layers.1 (root)"),
        ("perceptron", "0 2 3 (root)"),
        ("t5_weights", "encoder.blocks.0 encoder.blocks.1 decoder.blocks.0 decoder.blocks.1 (root)"),
        ("gpt2", "transformer.wpe transformer.h.0 transformer.h.1 (root)"),
        ("vit", "patches encoder.0 encoder.1 norm+head.0+head.2 (root)"),
        ("albert", "embedding layers.0 (root)"),
        ("shared_module", "embedding blocks.0.up blocks.0 blocks.1 blocks.2 (root)"),
        ("shared_module_backwards", "embedding blocks.0.up blocks.0 blocks.1 blocks.2 (root)"),
        ("shared_weight", "embedding blocks.0.up+blocks.2.up blocks.0 blocks.1 blocks.2 (root)"),
        ("listed_experts", "embedding blocks.0.moe blocks.0 blocks.1.moe blocks.1 (root)"),
        ("fused_experts", "embedding blocks.0.moe.experts blocks.0 blocks.1.moe.experts blocks.1 (root)"),
        ("pairs", "embedding layers.0.0 layers.0.1 layers.1.0 layers.1.1 out (root)"),
        ("named", "embedding stages.0.a stages.0.b stages.1.0 unused (root)"),
        ("crossed", "embedding blocks.0+blocks.1 (root)"),
        ("root_reads", "embedding blocks.1 (root)"),
    ],
)
def test_units_are_blocks_and_separately_embeddings_and_heads(name: str, expected: str) -> None:
    assert " ".join(units_of(on_meta(name))) == expected


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("encoder", {"encoder.norm.weight", "encoder.norm.bias"}),  # a norm alone is no unit
        ("t5_module", {"encoder.norm.weight", "encoder.norm.bias"}),  # it stands between two stacks
        ("vit", {"class_token", "prompts.0", "prompts.1"}),
    ],
)
def test_the_root_has_what_belongs_to_no_other_unit(name: str, parameters: set[str]) -> None:
    assert set(units_of(on_meta(name))[ROOT].parameters) == parameters


@pytest.mark.parametrize(("name", "last"), [("decoder", "norm+head"), ("t5_module", "decoder.norm+head")])
def test_only_the_last_unit_is_kept_until_backward(name: str, last: str) -> None:
    assert [unit.name for unit in units_of(on_meta(name)).values() if unit.keep_until_backward] == [last]


def test_units_of_experts_are_marked() -> None:
    units = units_of(on_meta("listed_experts"))
    assert [name for name, unit in units.items() if unit.may_lack_gradients] == [
        "blocks.0.moe",
        "blocks.1.moe",
    ]
    assert "blocks.0.moe.router.weight" in units["blocks.0.moe"].parameters


def test_size_policy_makes_units_of_at_least_that_size() -> None:
    units = units_of(on_meta("decoder"), min_parameters=180)
    sizes = {name: unit.numel for name, unit in units.items()}
    assert sizes == {
        "blocks.0.attention": 192,
        "blocks.0.feed_forward": 240,
        "blocks.1.attention": 192,
        "blocks.1.feed_forward": 240,
        ROOT: 13 * 8 * 2 + 5 * 8,
    }


def test_size_policy_chooses_called_modules_only() -> None:
    with torch.device("meta"):
        units = units_of(Encoder(), min_parameters=50)
    assert "encoder.layers.0.self_attn" in units
    assert not any("out_proj" in name for name in units)


def test_a_pattern_means_the_outermost_modules_that_match() -> None:
    model = on_meta("listed_experts")
    assert list(units_of(model, names=("blocks.*",))) == ["blocks.0", "blocks.1", ROOT]
    nested = units_of(model, names=("blocks.*", "blocks.*.moe"))
    assert list(nested) == ["blocks.0.moe", "blocks.0", "blocks.1.moe", "blocks.1", ROOT]


def test_a_unit_predicate_overrides_the_unit_settings() -> None:
    units = find_units(
        on_meta("decoder"), UnitSection(), predicate=lambda name, _: name.endswith("attention")
    )
    assert [unit.name for unit in units] == ["blocks.0.attention", "blocks.1.attention", ROOT]


def test_overrides_match_units_by_any_of_their_names() -> None:
    section = {
        "overrides": ({"match": "head", "strategy": "no_shard"}, {"match": "blocks.*", "precision": "bf16"})
    }
    units = units_of(on_meta("decoder"), **section)
    assert {name: unit.override and unit.override.match for name, unit in units.items()} == {
        "embedding": None,
        "blocks.0": "blocks.*",
        "blocks.1": "blocks.*",
        "norm+head": "head",
        ROOT: None,
    }


@pytest.mark.parametrize("section", [{}, {"min_parameters": 10**6}, {"names": ("embedding",)}])
def test_repeated_blocks_recompute_for_any_units(section: dict[str, Any]) -> None:
    model = on_meta("decoder")
    units = find_units(model, UnitSection(**section))
    assert find_recompute_and_compile_blocks(model, units=units) == list(model.blocks)


def test_recompute_works_on_the_outermost_units_where_nothing_repeats() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)), nn.Linear(4, 4))
    section = UnitSection(names=("0", "0.0", "1"))
    assert find_recompute_and_compile_blocks(model, units=find_units(model, section)) == [model[0], model[1]]


def test_a_dense_head_of_two_layers_is_no_pair_of_blocks() -> None:
    model = nn.Module()
    model.body = nn.ModuleList(Block() for _ in range(2))
    model.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    assert list(units_of(model)) == ["body.0", "body.1", "head.0+head.2", ROOT]


@pytest.mark.parametrize(
    ("model", "section", "message"),
    [
        (nn.Tanh(), {}, "no parameters"),
        (nn.Linear(2, 2), {}, "no repeated block"),
        (nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(2)), {}, "without a shape"),
        (Repeating(), {"names": ("blocks.*",)}, "no module that is called matches 'blocks"),
        (Repeating(), {"names": ("layers",)}, "no module that is called matches 'layers'"),
        (Repeating(), {"overrides": ({"match": "head"},)}, "no unit matches 'head'"),
    ],
)
def test_models_without_units_are_refused(model: nn.Module, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        find_units(model, UnitSection(**section))


def test_a_predicate_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(ShardError, match="chose no module"):
        find_units(on_meta("decoder"), UnitSection(), predicate=lambda *_: False)


class Node(nn.Module):
    def __init__(self, children: list[nn.Module], *, listed: bool) -> None:
        super().__init__()
        if children:
            self.inner = nn.ModuleList(children) if listed else nn.Sequential(*children)
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Random trees, in which modules stand in several places, and modules share weights."""
    nodes: list[nn.Module] = [Node([], listed=False) for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 5))):
        children = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
        nodes.append(Node(children, listed=draw(st.booleans())))
    root = Node(nodes[-3:], listed=True)
    anyone = st.sampled_from([*nodes, root])
    for module, other in draw(st.lists(st.tuples(anyone, anyone), max_size=3)):
        module.weight = other.weight
    return root


@settings(max_examples=50)
@given(model=trees(), chosen=st.sets(st.integers(0, 20)), minimum=st.integers(1, 12))
def test_every_parameter_of_any_tree_is_in_one_unit(model: nn.Module, chosen: set[int], minimum: int) -> None:
    places = {module: i for i, module in enumerate(model.modules())}
    if any(places[m] in chosen and isinstance(m, Node) for m in model.modules() if m is not model):
        units = find_units(model, UnitSection(), predicate=lambda _, module: places[module] in chosen)
        check_partition(model, units)
    check_partition(model, find_units(model, UnitSection(min_parameters=minimum)))
