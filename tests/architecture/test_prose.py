"""Plain English: how docstrings open, and words that hide who does what."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, Module, package

FRAGMENTS = re.compile(r"(What|Of|That|Where|Whether|The same)\b")
UNCLEAR = re.compile(r"\b(told|goes on|go on)\b", re.IGNORECASE)  # say: reports, logs, resumes, continues
BENCH = sorted((ROOT / "bench").rglob("*.py"))
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


def unclear(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [f"{path.name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if UNCLEAR.search(line)]


def test_docstrings_open_with_a_verb_or_a_noun():
    bench = [Module(path.name, path, path.read_text(encoding="utf-8")) for path in BENCH]
    assert [line for module in (*package().values(), *bench) for line in fragments(module)] == []


def test_source_bench_and_docs_have_no_unclear_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    paths = [module.path for module in package().values()] + pages + BENCH
    assert [line for path in paths for line in unclear(path)] == []


def test_prose_rules_find_violations():
    assert fragments(Module("a", ROOT, 'def f():\n    """Where it lies."""'))
    assert not fragments(Module("a", ROOT, 'def f():\n    """Returns where it lies."""'))
