"""Plain English: how docstrings open, and words that hide who does what, in names too; links of pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, Module, package

FRAGMENTS = re.compile(r"(What|Of|That|Where|Whether|The same)\b")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
UNCLEAR = re.compile(r"\b(told|goes on|go on)\b", re.IGNORECASE)  # say: reports, logs, resumes, continues
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")]
PLACES = ("bench", "tests", "examples", "recipes")
OTHER_SOURCES = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text is not None:
            yield getattr(node, "lineno", 1), text


def fragments(module: Module) -> list[str]:
    return [
        f"{module.name}:{line}: {text[:60]}" for line, text in docstrings(module) if FRAGMENTS.match(text)
    ]


def unclear(text: str, *, name: str) -> list[str]:
    """Returns the lines with unclear words, of which names may consist, too."""
    lines = text.replace("_", " ").splitlines()
    return [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if UNCLEAR.search(line)]


def test_docstrings_open_with_a_verb_or_a_noun():
    others = [Module(path.name, path, path.read_text(encoding="utf-8")) for path in OTHER_SOURCES]
    assert [line for module in (*package().values(), *others) for line in fragments(module)] == []


def test_sources_and_docs_have_no_unclear_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    paths = [module.path for module in package().values()] + pages + OTHER_SOURCES
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path != Path(__file__)}
    assert [line for path, text in texts.items() for line in unclear(text, name=path.name)] == []


def test_prose_rules_find_violations():
    assert fragments(Module("a", ROOT, 'def f():\n    """Where it lies."""'))
    assert not fragments(Module("a", ROOT, 'def f():\n    """Returns where it lies."""'))
    assert unclear("def test_runs_go_on(): ...", name="a.py")
    assert not unclear("def test_a_run_resumes(): ...", name="a.py")


def test_relative_links_of_all_pages_lead_to_files():
    targets = [(page, target) for page in PAGES for target in LINK.findall(page.read_text(encoding="utf-8"))]
    assert targets
    assert [f"{page}: {target}" for page, target in targets if not (page.parent / target).exists()] == []
