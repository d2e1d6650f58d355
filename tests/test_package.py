"""Metadata of the package, links between its pages, and its errors."""

import pickle
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from fullshard.errors import FullshardError, MissingExtraError, PlanError

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def test_relative_links_of_all_pages_lead_to_files():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("bench/**/*.md"),
    ]
    targets = [(page, target) for page in pages for target in LINK.findall(page.read_text())]
    broken = [f"{page}: {target}" for page, target in targets if not (page.parent / target).exists()]
    assert targets
    assert not broken


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
