"""Packages: none outgrows the others, each states its purpose, and no class name stands for two things."""

import ast
from collections import Counter, defaultdict

from tests.architecture.source import PACKAGE, ROOT, package

LARGEST_SHARE = 0.12  # of the lines of src


def packages() -> set[str]:
    return {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}


def test_no_folder_holds_more_than_its_share_of_the_lines():
    lines = Counter[str]()
    for module in package().values():
        lines[str(module.path.parent.relative_to(PACKAGE))] += module.text.count("\n")
    assert {folder: n for folder, n in lines.items() if n > LARGEST_SHARE * lines.total()} == {}


def test_every_package_states_its_purpose_in_one_sentence():
    names = {name: "fullshard." + name.replace("/", ".") for name in packages()}
    heads = {name: ast.get_docstring(package()[module].tree) or "" for name, module in names.items()}
    assert [name for name, head in heads.items() if not head.split("\n")[0].endswith(".")] == []


def test_the_map_of_contributing_names_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in sorted(packages()) if f"| `{name}/` |" not in text] == []


def test_no_class_name_stands_in_two_modules():
    places = defaultdict[str, list[str]](list)
    for module in package().values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
