"""Private names of torch are used in one package, where they are listed."""

import ast
from collections.abc import Iterator

from tests.architecture.source import Module, package
from tests.architecture.test_imports import made_of

HOME = "torch_private"
# Names with an underscore that are public by their library's documentation, or not torch's.
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
OF_PYTHON = {"_exit", "_current_frames"}
OF_TRANSFORMERS = {"_attn_implementation", "_model_mapping", "_keys_to_ignore_on_load_unexpected"}
OF_DATASETS, OF_FSSPEC, OF_TORCHAO = {"_fingerprint"}, {"_strip_protocol"}, {"_scale"}
OTHERS = OF_NAMED_TUPLES | OF_PYTHON | OF_TRANSFORMERS | OF_DATASETS | OF_FSSPEC | OF_TORCHAO
OPERATIONS = ("torch.ops.", "_ATEN.")  # names of operations, which are a stable interface


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_defined(modules: dict[str, Module]) -> set[str]:
    """Names that fullshard itself gives to functions, classes, fields and attributes."""
    names = set[str]()
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= (
                    {node.attr}
                    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                    else set()
                )
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def private_uses(module: Module, *, own: set[str]) -> Iterator[str]:
    """Yields the places of a module that use a private name of torch."""
    for imported in module.imports:
        if imported.module.split(".")[0] == "torch" and any(
            map(is_private, f"{imported.module}.{imported.name}".split("."))
        ):
            yield f"{module.name}:{imported.line} {imported.module}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | OTHERS:
            text = ast.unparse(node)
            if not text.startswith(OPERATIONS):
                yield f"{module.name}:{node.lineno} {text}"


def test_private_names_of_torch_are_used_in_one_package():
    modules = package()
    own = names_defined({name: one for name, one in modules.items() if one.package != HOME})
    assert [
        use for one in modules.values() if one.package != HOME for use in private_uses(one, own=own)
    ] == []


def test_private_names_elsewhere_are_reported():
    texts = [
        *("from torch._guards import x", "import torch._dynamo", "y = state._fsdp_param_group"),
        *("import torch", "f = torch.ops.aten._to_copy"),
    ]
    found = [
        bool(list(private_uses(*made_of(fullshard__data__x=text).values(), own=set()))) for text in texts
    ]
    assert found == [True, True, True, False, False]
