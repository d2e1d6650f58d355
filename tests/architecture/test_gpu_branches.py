"""The table of code that only GPUs take names tests and modules that exist."""

import ast
import re

from bench.gpu.programme_items import ITEMS
from tests.architecture.source import PACKAGE, ROOT

TABLE = (ROOT / "docs" / "design" / "gpu-branches.md").read_text(encoding="utf-8")


def test_the_named_tests_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE))
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_fewer_than_20_parts_have_no_test_and_each_has_an_item_of_the_programme() -> None:
    items = re.findall(r"\| none: `([^`]+)`", TABLE)
    assert items
    assert len(items) == TABLE.count("| none") < 20
    assert {*items} <= {item.name for item in ITEMS}


def test_the_named_modules_exist() -> None:
    rows = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `")]
    assert all(list(PACKAGE.glob(name)) for row in rows for name in re.findall(r"`([\w/*.]+)`", row))
