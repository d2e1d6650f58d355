"""Metadata of the package, and its errors."""

import pickle
from importlib.metadata import metadata

import pytest

from fullshard.errors import FullshardError, MissingExtraError, PlanError


def test_the_metadata_has_a_summary_a_readme_and_classifiers():
    package = metadata("fullshard")
    assert package["Summary"]
    assert package["License-Expression"] == "Apache-2.0"
    assert package["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in package.get_all("Classifier", [])
    assert package["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize(
    "error",
    [
        PlanError("what", got=3, why="why", fix="fix"),
        MissingExtraError("hf", package="transformers", needed_for="it"),
    ],
)
def test_errors_are_pickled_with_their_parts(error: FullshardError):
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.why, back.fix) == (type(error), str(error), error.why, error.fix)
