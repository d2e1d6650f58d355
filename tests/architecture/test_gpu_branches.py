"""The table of code that only GPUs take names tests and modules that exist."""

import ast
import re

from tests.architecture.source import PACKAGE, ROOT

TABLE = (ROOT / "docs" / "design" / "gpu-branches.md").read_text(encoding="utf-8")


def test_the_named_tests_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE))
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_the_named_modules_exist() -> None:
    rows = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `")]
    assert all(list(PACKAGE.glob(name)) for row in rows for name in re.findall(r"`([\w/*.]+)`", row))
