"""The package as text: its modules, what each imports, and when."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fullshard"


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written, `name` for `from module import name`."""

    module: str
    name: str | None
    line: int
    at_import: bool  # False inside a function or under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, found once for all rules."""
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def package(self) -> str:
        """`fullshard.spec.run` -> `spec`; the package itself is ``."""
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, at_import=True))


def load(path: Path, *, root: Path) -> Module:
    """The module at `path`, named from `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return Module(".".join(parts), path, path.read_text(encoding="utf-8"))


@cache
def package() -> dict[str, Module]:
    """Every module of fullshard by its dotted name."""
    modules = [load(path, root=PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py"))]
    return {module.name: module for module in modules}


@cache
def everything() -> list[Module]:
    """Every Python file of the repository: the package, its tests, bench and examples."""
    folders = [PACKAGE, ROOT / "tests", ROOT / "bench", ROOT / "examples"]
    return [load(path, root=ROOT) for folder in folders for path in sorted(folder.rglob("*.py"))]


def targets(imported: Import, modules: dict[str, Module]) -> list[str]:
    """The modules of `modules` that an import loads; `from package import submodule` loads the submodule."""
    inner = f"{imported.module}.{imported.name}"
    if imported.name is not None and inner in modules:
        return [inner]
    return [imported.module] if imported.module in modules else []


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield from (Import(module, alias.name, child.lineno, at_import) for alias in child.names)
        else:
            yield from _imports(child, at_import=at_import and not _is_run_later(child))


def _is_run_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
