"""What keeps the code readable: budgets, names, signatures, docstrings. A rule returns its findings as lines.

Raising a budget is a commit of its own with a reason. A signature that somebody else dictates (a hook, an
autograd function) says whose it is on its `def` line: `# signature: torch's forward hook`.
"""

import ast
import importlib
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, everything, package

FUNCTION_LINES, FILE_LINES, CLASS_LINES, CLASS_METHODS = 60, 500, 250, 15
PARAMETERS, POSITIONAL = 7, 2
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def over_budget(module: Module) -> list[str]:
    lines = module.text.count("\n")
    found = [f"{lines} lines in the file (at most {FILE_LINES})"] if lines > FILE_LINES else []
    for node in ast.walk(module.tree):
        if isinstance(node, Function) and _lines(node) > FUNCTION_LINES:
            found.append(f"{node.lineno}: {node.name} has {_lines(node)} lines (at most {FUNCTION_LINES})")
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(child, Function) for child in node.body)
            if _lines(node) > CLASS_LINES or methods > CLASS_METHODS:
                found.append(f"{node.lineno}: {node.name} has {_lines(node)} lines, {methods} methods")
    return found


def unclear_signatures(module: Module) -> list[str]:
    found: list[str] = []
    for function, is_method in _functions(module.tree):
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
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or {"Exception", "BaseException"} & _names(node.type))
    ]


def asserts_without_message(module: Module) -> list[str]:
    return [
        f"{node.lineno}" for node in ast.walk(module.tree) if isinstance(node, ast.Assert) and not node.msg
    ]


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


def _lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _functions(tree: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Every function, and whether its first parameter is `self` or `cls`."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                static = any(ast.unparse(one) == "staticmethod" for one in child.decorator_list)
                yield child, isinstance(node, ast.ClassDef) and not static


def _is_dictated(function: Function, module: Module) -> bool:
    """Python dictates its own dunder methods, and `nn.Module.__call__` hands `forward` what it got."""
    dunder = function.name.startswith("__") and function.name.endswith("__") and function.name != "__init__"
    head = module.text.splitlines()[function.lineno - 1 : function.body[0].lineno]
    return dunder or function.name == "forward" or any("# signature: " in line for line in head)


def of(text: str) -> Module:
    module = next(iter(package().values()))
    return Module("fullshard.sample", module.path, text)


@pytest.mark.parametrize("module", everything(), ids=lambda module: module.name)
def test_budgets_hold(module):
    assert over_budget(module) == []


@pytest.mark.parametrize("module", package().values(), ids=lambda module: module.name)
def test_rules_hold(module):
    rules = (unclear_signatures, broad_handlers, asserts_without_message, effects_at_import)
    assert {rule.__name__: found for rule in rules if (found := rule(module))} == {}


@pytest.mark.parametrize("module", package().values(), ids=lambda module: module.name)
def test_modules_say_what_they_are(module):
    assert not NAMES_THAT_SAY_NOTHING & set(module.name.split("."))
    assert ast.get_docstring(module.tree), "the first line of a module says what it holds"


def test_what_the_library_exports_is_documented():
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
    ],
)
def test_each_rule_sees_what_it_is_for(rule, text):
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
        (effects_at_import, "app = App()\napp.add(verb)\nif __name__ == '__main__':\n    app()"),
    ],
)
def test_each_rule_leaves_the_rest_alone(rule, text):
    assert rule(of(text)) == []
