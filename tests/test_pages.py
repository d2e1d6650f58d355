"""Code blocks of README and docs: settings load, commands have these options, programs use names that exist.

The programs of the README, of docs/loops-*.md and of docs/learn run in other tests.
"""

import ast
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullshard as fs
from fullshard.spec.run import Run
from tests.command_line import parse_arguments

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for room in ("docs", "recipes", "examples", "deploy")
        for page in sorted((ROOT / room).rglob("*.md"))
    ),
]
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yields (page and line, text) of all blocks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if found[1] == language:
                yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[2]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields (page and line, arguments) of each `fullshard …` in a block."""
    for place, text in blocks("console"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                words = shell_words(line[2:])
                starts = [
                    i for i, word in enumerate(words) if word == "fullshard" and words[:i][-1:] != ["install"]
                ]
                if starts:
                    yield place, words[starts[0] + 1 :]


def shell_words(line: str) -> list[str]:
    """Returns the words of the first command of a line. Text behind two blanks explains it."""
    parser = shlex.shlex(line.partition("  ")[0], posix=True, punctuation_chars=True)
    parser.whitespace_split = True
    return list(itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), parser))


@pytest.mark.parametrize(("place", "text"), [one for one in blocks("toml") if "pyproject" not in one[1]])
def test_settings_load(place: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    Run.load(path)


@pytest.mark.parametrize(("place", "arguments"), list(commands()))
def test_commands_have_these_options(place: str, arguments: list[str]) -> None:
    values = parse_arguments(arguments)
    named = [ROOT / word for word in arguments if word.endswith(".toml") and (ROOT / word).exists()]
    Run.load(*named[:1], overrides=values.get("overrides") or ())


@pytest.mark.parametrize(("place", "text"), list(blocks("python")))
def test_programs_use_names_that_exist(place: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fs":
            assert hasattr(fs, node.attr), f"fs.{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fullshard"):
            module = importlib.import_module(node.module or "")
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []
