"""Who may import whom, no cycles, and no torch where the command line must answer in a blink.

    cli -> jobs -> observe -> training -> weights -> offload | checkpoint | data | parallel -> models
    cli -> convert          jobs, planner -> data | launch | report, parallel
    jobs -> planner         observe, training -> survival
    every package with torch -> distributed -> torch_private, spec -> system -> quantities -> errors

A package may import anything further right. Packages separated by a bar do not import each other.
"""

import graphlib
import re
import subprocess
import sys

from tests.architecture.source import Import, Module, package, targets

FOUNDATION = {"quantities", "errors", "system"}
VALUES = {"spec"} | FOUNDATION
SHARED = {"distributed", "torch_private"} | VALUES
LOWER = {"checkpoint", "data", "launch", "models", "offload", "survival"}  # import none of each other
STATE = {"checkpoint", "models", "offload", "parallel"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "quantities": {"errors"},
    "system": {"quantities", "errors"},
    "spec": FOUNDATION,
    "torch_private": {"errors"},
    "distributed": {"torch_private"} | VALUES,
    **dict.fromkeys(LOWER, SHARED),
    "convert": VALUES,
    "report": VALUES,
    "parallel": {"models"} | SHARED,
    "planner": {"data", "launch", "models", "parallel", "report"} | SHARED,
    "weights": {"data"} | STATE | SHARED,
    "training": {"weights", "survival", "data"} | STATE | SHARED,
    "observe": {"training", "parallel", "survival", "report"} | SHARED,
    "takeover": {"training", "weights", "planner", "convert", "parallel"} | LOWER | SHARED,
    "jobs": {"observe", "training", "weights", "planner", "parallel", "report"} | LOWER | SHARED,
    "cli": {"jobs", "observe", "takeover", "weights", "planner", "report", "convert", ""} | LOWER | SHARED,
    "": {"training", "weights", "planner", "parallel", "report"} | LOWER | SHARED,
    "__main__": {"cli"},
}
PURE = {"convert", "report", "planner.predict", "planner.search"}
TORCH_FREE = VALUES | PURE
TORCH_FREE_AT_IMPORT = ("fullshard", "fullshard.cli", "fullshard.cli.main", "fullshard.__main__")


def is_torch_free(module: Module) -> bool:
    """Returns whether `module` is in a package that must not import torch."""
    return f"{module.name}.".startswith(tuple(f"fullshard.{name}." for name in TORCH_FREE))


def forbidden_imports(module: Module, modules: dict[str, Module]) -> list[str]:
    allowed = MAY_IMPORT[module.package] | {module.package}
    return [
        f"{module.path.name}:{imported.line} {module.package or 'fullshard'} imports {target}"
        for imported in module.imports
        for target in targets(imported, modules)
        if modules[target].package not in allowed
    ]


def cycle(modules: dict[str, Module]) -> list[str]:
    """The modules of one import cycle, lazy imports included; empty where there is none."""
    graph = {
        name: {target for imported in module.imports for target in targets(imported, modules)} - {name}
        for name, module in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def way_to_torch(name: str, modules: dict[str, Module]) -> list[str]:
    """The chain of imports that loads torch when the module `name` is imported; empty where none does."""
    ways, seen = [[name]], {name}
    for way in ways:
        if any(is_torch(imported) for imported in modules[way[-1]].imports if imported.at_import):
            return [*way, "torch"]
        for following in sorted(_loaded_with(way[-1], modules) - seen):
            seen.add(following)
            ways.append([*way, following])
    return []


def is_torch(imported: Import) -> bool:
    return imported.module.split(".")[0] == "torch" or imported.module == "safetensors.torch"


def _loaded_with(name: str, modules: dict[str, Module]) -> set[str]:
    loaded = {name}
    for imported in modules[name].imports:
        loaded |= set(targets(imported, modules)) if imported.at_import else set()
    # Importing a.b.c runs a/__init__.py and a/b/__init__.py first.
    packages = {one.rsplit(".", depth)[0] for one in loaded for depth in range(1, one.count(".") + 1)}
    return loaded | (packages & set(modules))


def made_of(**texts: str) -> dict[str, Module]:
    """Modules by name (`fullshard__spec__run`) and text, to hold the checks themselves against."""
    names = {name: name.replace("__", ".") for name in texts}
    return {names[key]: Module(names[key], PATH, text) for key, text in texts.items()}


PATH = next(iter(package().values())).path


def test_every_package_has_its_allowed_imports():
    """A new package: add it to the map here, in CONTRIBUTING and in the docs."""
    assert {module.package for module in package().values()} - set(MAY_IMPORT) == set()


def test_imports_follow_the_one_direction():
    assert [line for module in package().values() for line in forbidden_imports(module, package())] == []


def test_imports_name_the_module_in_full():
    modules = package().values()
    assert [(m.name, one.line) for m in modules for one in m.imports if one.module.startswith(".")] == []


def test_no_import_cycle():
    assert cycle(package()) == []


def test_values_predictions_and_report_never_import_torch():
    modules = [one for one in package().values() if is_torch_free(one)]
    assert [(m.name, one.line) for m in modules for one in m.imports if is_torch(one)] == []
    assert [way for module in modules if (way := way_to_torch(module.name, package()))] == []


def test_the_command_line_starts_without_torch():
    names = [name for name in TORCH_FREE_AT_IMPORT if name in package()]
    assert [way for name in names if (way := way_to_torch(name, package()))] == []


def test_no_dependency_brings_torch_in():
    names = [module.name for module in package().values() if is_torch_free(module)]
    names += [name for name in TORCH_FREE_AT_IMPORT if name in package() and name != "fullshard.__main__"]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_import_rules_find_violations():
    wrong = made_of(
        fullshard__spec__run="from fullshard.parallel.apply import shard", fullshard__parallel__apply=""
    )
    assert forbidden_imports(wrong["fullshard.spec.run"], wrong)
    bar = made_of(
        fullshard__models__a="def f():\n    import fullshard.checkpoint.b", fullshard__checkpoint__b=""
    )
    assert forbidden_imports(bar["fullshard.models.a"], bar)
    ring = made_of(
        fullshard__spec__a="from fullshard.spec import b", fullshard__spec__b="import fullshard.spec.a"
    )
    assert set(cycle(ring)) == {"fullshard.spec.a", "fullshard.spec.b"}
    through_package = made_of(
        fullshard__report__table="from fullshard.spec.plan import Plan",
        fullshard__spec="from torch import nn",
        fullshard__spec__plan="",
    )
    assert way_to_torch("fullshard.report.table", through_package)[-2:] == ["fullshard.spec", "torch"]
    lazy = made_of(fullshard__cli__main="def train():\n    import torch")
    assert way_to_torch("fullshard.cli.main", lazy) == []


def test_no_child_process_looks_for_modules_in_the_working_directory() -> None:
    starts = r'sys\.executable,\s*(?:args=\()?("[^"]*")'
    assert {option for one in package().values() for option in re.findall(starts, one.text)} == {'"-P"'}
