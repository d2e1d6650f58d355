"""[model] python: any module, by the dotted path of what makes it."""

import pytest
import torch

from fullshard.errors import FullshardError, SpecError
from fullshard.models.build import build_python_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.settings.model_section import PythonModel


def section(name: str, **options: object) -> PythonModel:
    return PythonModel(python=f"tests.models.own:{name}", options=options)


def test_the_factory_is_called_with_the_options() -> None:
    model = build_python_model(section("Pyramid", width=4, inner=(3, 8)))
    assert [layer.up.weight.shape for layer in model.layers] == [(3, 4), (8, 4)]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_values_that_the_constructor_computes_are_kept() -> None:
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
def test_a_python_path_that_yields_no_model_is_refused(python: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_python_model(PythonModel(python=python))


def test_options_that_the_factory_does_not_take_are_refused() -> None:
    with pytest.raises(SpecError, match="unexpected keyword argument 'depth'"):
        build_python_model(section("Pyramid", depth=3))


@pytest.mark.parametrize("what", ["spectral norm", "scale", "buffer"])
def test_a_constructor_that_reads_meta_tensors_is_refused_with_a_fix_that_works(what: str) -> None:
    with pytest.raises(FullshardError) as raised:
        materialize(build_python_model(section("ReadsInConstructor", what=what)), seed=0)
    assert 'try: with torch.device("cpu"): around' in str(raised.value)
    model = materialize(build_python_model(section("ReadsInConstructor", what=what, within=True)), seed=0)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert what != "buffer" or model.table.tolist() == [2.0, 2.0, 2.0]
    if what == "spectral norm":  # its estimate is exact after some steps
        for _ in range(50):
            normed = model.inner.weight
        assert torch.linalg.matrix_norm(normed, 2).item() == pytest.approx(1.0, rel=1e-3)
