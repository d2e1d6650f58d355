"""Rooms: none outgrows the others, each says what it is for, and no class name stands for two things."""

import ast
from collections import Counter, defaultdict

from tests.architecture.source import PACKAGE, ROOT, package

LARGEST_SHARE = 0.12  # of the lines of src


def rooms() -> set[str]:
    return {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def test_no_room_holds_more_than_its_share_of_the_lines():
    lines = Counter[str]()
    for module in package().values():
        lines[module.room] += module.text.count("\n")
    assert {room: n for room, n in lines.items() if n > LARGEST_SHARE * lines.total()} == {}


def test_every_room_says_in_one_sentence_what_it_is_for():
    heads = {room: ast.get_docstring(package()[f"fullshard.{room}"].tree) or "" for room in rooms()}
    assert [room for room, head in heads.items() if not head.split("\n")[0].endswith(".")] == []


def test_the_map_of_contributing_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [room for room in sorted(rooms()) if f"| `{room}/` |" not in text] == []


def test_no_class_name_stands_in_two_modules():
    places = defaultdict[str, list[str]](list)
    for module in package().values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
