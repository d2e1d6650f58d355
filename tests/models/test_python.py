"""[model] python: any module, by the dotted path of what makes it."""

import pytest
import torch

from fullshard.errors import SpecError
from fullshard.models.build import build_python_model
from fullshard.sharding.materialize import materialize
from fullshard.spec.model_section import PythonModel


def section(name: str, **options: object) -> PythonModel:
    return PythonModel(python=f"tests.models.own:{name}", options=options)


def test_the_factory_is_called_with_the_options() -> None:
    model = build_python_model(section("Pyramid", width=4, inner=(3, 8)))
    assert [layer.up.weight.shape for layer in model.layers] == [(3, 4), (8, 4)]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_the_constructor_computes_stays() -> None:
    model = materialize(build_python_model(section("Pyramid")), seed=0)
    assert torch.equal(model.layers[1].shift, torch.linspace(0, 1, 6))
    assert torch.equal(model.layers[1].scale, torch.full((6,), 0.5))


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("tests.models.own", "does not exist"),
        ("tests.models.nowhere:make", "cannot be imported"),
        ("tests.models.own:Pyramids", "own has no Pyramids"),
        ("tests.models.own:__doc__", "is not a function"),
        ("tests.models.own:no_module", "made no module"),
    ],
)
def test_a_path_that_leads_to_no_module_is_told(python: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_python_model(PythonModel(python=python))


def test_options_that_the_factory_does_not_take_are_told() -> None:
    with pytest.raises(SpecError, match="unexpected keyword argument 'depth'"):
        build_python_model(section("Pyramid", depth=3))
