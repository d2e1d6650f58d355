"""Rules of readable code: budgets, names, signatures, docstrings. A rule returns its findings as lines.

Raising a budget is a commit of its own with a reason. A signature that somebody else dictates (a hook, an
autograd function) says whose it is on its `def` line: `# signature: torch's forward hook`.
"""

import ast
import importlib
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.architecture.source import Module, everything, package

FUNCTION_LINES, FILE_LINES, CLASS_LINES, CLASS_METHODS = 60, 500, 250, 15
PARAMETERS, POSITIONAL = 7, 2
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def over_budget(module: Module) -> list[str]:
    lines = module.text.count("\n")
    found = [f"{lines} lines in the file (at most {FILE_LINES})"] if lines > FILE_LINES else []
    for node in module.nodes:
        if isinstance(node, Function) and _lines(node) > FUNCTION_LINES:
            found.append(f"{node.lineno}: {node.name} has {_lines(node)} lines (at most {FUNCTION_LINES})")
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(child, Function) for child in node.body)
            if _lines(node) > CLASS_LINES or methods > CLASS_METHODS:
                found.append(f"{node.lineno}: {node.name} has {_lines(node)} lines, {methods} methods")
    return found


def unclear_signatures(module: Module) -> list[str]:
    found: list[str] = []
    for function, is_method in _functions(module):
        if _is_dictated(function, module):
            continue
        arguments = function.args
        positional = len(arguments.posonlyargs) + len(arguments.args) - is_method
        count = positional + len(arguments.kwonlyargs)
        where = f"{function.lineno}: {function.name}"
        if count > PARAMETERS:
            found.append(f"{where} takes {count} parameters (at most {PARAMETERS})")
        if positional > POSITIONAL:
            found.append(
                f"{where} takes {positional} positional parameters (keyword-only after {POSITIONAL})"
            )
        if arguments.kwarg is not None:
            found.append(f"{where} takes **{arguments.kwarg.arg}")
    return found


def broad_handlers(module: Module) -> list[str]:
    return [
        f"{node.lineno}: except {ast.unparse(node.type) if node.type else ''}"
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & _names(node.type))
    ]


def asserts_without_message(module: Module) -> list[str]:
    return [f"{node.lineno}" for node in module.nodes if isinstance(node, ast.Assert) and not node.msg]


def effects_at_import(module: Module) -> list[str]:
    """Calls made for their effect when the module is imported; on an object of its own, they build it."""
    own = {
        name
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in _names(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    }
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in module.tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and not own & _names(node.value.func)
    ]


def undocumented(module: Module) -> list[str]:
    """Public functions and classes of a module without a docstring."""
    return [
        f"{node.lineno}: {node.name}"
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def unclear_module(module: Module) -> list[str]:
    """A name that says nothing, or no docstring to say what the module holds."""
    found = [f"named {part}" for part in module.name.split(".") if part in NAMES_THAT_SAY_NOTHING]
    return found if ast.get_docstring(module.tree) else [*found, "no docstring"]


def patches(module: Module) -> list[str]:
    """`unittest.mock`, and monkeypatch's `setattr` and `delattr` on what comes from fullshard.

    A fake goes through a seam: an argument of the constructor or function that uses it.
    """
    mocks = [
        f"{one.line}: {one.module}"
        for one in module.imports
        if one.module.split(".")[0] == "mock" or f"{one.module}.{one.name}.".startswith("unittest.mock.")
    ]
    own = {(one.name or one.module.split(".")[0]) for one in module.imports if _is_own(one.module)}
    own |= {
        node.asname
        for statement in module.nodes
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for node in statement.names
        if node.asname and _is_own(getattr(statement, "module", None) or node.name)
    }
    return mocks + [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in module.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "delattr")
        and node.args
        and (own & _names(node.args[0]) or _is_own(getattr(node.args[0], "value", None)))
    ]


def _is_own(name: object) -> bool:
    return isinstance(name, str) and name.split(".")[0] == "fullshard"


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _functions(module: Module) -> Iterator[tuple[Function, bool]]:
    """Every function, and whether its first parameter is `self` or `cls`."""
    for node in module.nodes:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                static = any(ast.unparse(one) == "staticmethod" for one in child.decorator_list)
                yield child, isinstance(node, ast.ClassDef) and not static


def _is_dictated(function: Function, module: Module) -> bool:
    """Python dictates its own dunder methods, and `nn.Module.__call__` hands `forward` what it got."""
    dunder = function.name.startswith("__") and function.name.endswith("__") and function.name != "__init__"
    head = module.lines[function.lineno - 1 : function.body[0].lineno]
    return dunder or function.name == "forward" or any("# signature: " in line for line in head)


def of(text: str) -> Module:
    module = next(iter(package().values()))
    return Module("fullshard.sample", module.path, text)


def found_in(modules: Iterable[Module], rule: Callable[[Module], list[str]]) -> dict[str, list[str]]:
    """The findings of a rule by the name of the module they are in."""
    return {module.name: found for module in modules if (found := rule(module))}


def test_budgets_hold():
    assert found_in(everything(), over_budget) == {}


@pytest.mark.parametrize(
    "rule",
    [unclear_signatures, broad_handlers, asserts_without_message, effects_at_import, unclear_module],
    ids=lambda rule: rule.__name__,
)
def test_rules_hold(rule):
    assert found_in(package().values(), rule) == {}


def test_tests_replace_nothing_of_the_package():
    assert found_in(everything(), patches) == {}


def test_public_functions_have_docstrings():
    library = importlib.import_module("fullshard")
    homes = {getattr(library, name).__module__ for name in library.__all__ if not name.startswith("_")}
    homes = {home for home in homes if home in package()} - {"fullshard.errors"}
    assert {home: found for home in homes if (found := undocumented(package()[home]))} == {}


def test_every_error_stands_in_the_tree():
    module = package()["fullshard.errors"]
    tree = ast.get_docstring(module.tree) or ""
    assert [
        node.name for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name not in tree
    ] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (over_budget, "def f():\n" + "    x = 1\n" * 60),
        (over_budget, "x = 1\n" * 501),
        (over_budget, "class C:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(16))),
        (unclear_signatures, "def f(a, b, c): ..."),
        (unclear_signatures, "class C:\n    def f(self, a, b, c): ..."),
        (unclear_signatures, "def f(a, *, b, c, d, e, f, g, h): ..."),
        (unclear_signatures, "def f(**options): ..."),
        (broad_handlers, "try: pass\nexcept: pass"),
        (broad_handlers, "try: pass\nexcept (OSError, Exception): pass"),
        (asserts_without_message, "assert 1"),
        (effects_at_import, "import os\nos.chdir('/')"),
        (undocumented, "def f(): ..."),
        (unclear_module, "x = 1"),
        (patches, "import unittest.mock"),
        (patches, "def f():\n    from unittest import mock"),
        (patches, "from unittest.mock import patch"),
        (patches, "from fullshard.spec import run\nmonkeypatch.setattr(run, 'LIMIT', 3)"),
        (patches, "import fullshard.spec.run as it\nmonkeypatch.setattr(it.Run, 'load', 3)"),
        (patches, "monkeypatch.setattr('fullshard.spec.run.LIMIT', 3)"),
        (patches, "from fullshard.spec.run import Run\npatch.delattr(Run, 'load')"),
    ],
)
def test_each_rule_finds_its_violation(rule, text):
    assert len(rule(of(text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            unclear_signatures,
            "class C:\n    def f(self, a, b, *, c): ...\n    def __exit__(self, a, b, c): ...",
        ),
        (unclear_signatures, "def hook(module, inputs, output):  # signature: torch's forward hook\n    ..."),
        (broad_handlers, "try: pass\nexcept OSError: pass"),
        (unclear_module, "'''What it holds.'''"),
        (patches, "import tempfile\nmonkeypatch.setattr(tempfile, 'tempdir', 'x')\nsetattr(model, 'x', 1)"),
        (effects_at_import, "app = App()\napp.add(verb)\nif __name__ == '__main__':\n    app()"),
    ],
)
def test_each_rule_leaves_the_rest_alone(rule, text):
    assert rule(of(text)) == []
