"""Finds repeated blocks, the modules around them, and the modules that are called, in a module tree."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def has_forward(module: nn.Module) -> bool:
    """Returns True if `module` defines `forward`. Lists and dicts of modules or parameters do not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def called_modules_with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules below the root that have parameters and are called, so that FSDP2's hooks run."""
    modules = dict(model.named_modules())
    return {
        name: module
        for name, module in modules.items()
        if name and has_parameters(module) and nearest_called_module_name(modules, name) == name
    }


def nearest_called_module_name(modules: Mapping[str, nn.Module], name: str) -> str:
    """Returns the name of the nearest called module: `name` itself or an ancestor; `""` is the root."""
    while name:
        parent = modules[name.rpartition(".")[0]]
        # Attention reads the weights of its output projection, and never calls it.
        if has_forward(modules[name]) and not isinstance(parent, nn.MultiheadAttention):
            return name
        name = name.rpartition(".")[0]
    return name


def name_and_ancestor_names(name: str) -> list[str]:
    """Returns the name and its ancestors' names: `"a.b.c"` -> `["a.b.c", "a.b", "a"]`."""
    return [name, *name_and_ancestor_names(name.rpartition(".")[0])] if name else []


def has_parameters(module: nn.Module) -> bool:
    """Returns True if `module` or a module below it has a parameter."""
    return any(True for _ in module.parameters())


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks: members of outermost containers that hold two modules of one class.

    The member of a ModuleList of length one is a block too, if it has submodules. Containers within a
    container are its stages, and their members are the blocks. If any blocks have submodules, repeated layers
    without submodules (an MLP beside a transformer) are not blocks.
    """
    groups = list(_iterate_block_groups("", model))
    composite = [group for group in groups if _any_has_submodules(group)]
    return {name: block for group in composite or groups for name, block in group.items()}


def group_modules_around_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], *, left_out: set[int]
) -> list[dict[str, nn.Module]]:
    """Groups the modules outside the blocks that hold parameters into runs, in order of registration.

    Returns one dict (name -> module) per run: the modules before the first block, those between two
    neighbouring blocks, and those after the last block. The first and last may be empty. Modules that contain
    blocks, or a parameter whose id is in `left_out`, are in no run.
    """
    runs: list[dict[str, nn.Module]] = [{}]
    modules = dict(model.named_modules())
    taken = "."  # a module in a run covers all modules below it
    for name, module in modules.items():
        if name in blocks and (runs[-1] or len(runs) == 1):
            runs.append({})
        own = any(True for _ in module.parameters(recurse=False))
        is_inside_block = not blocks.keys().isdisjoint(name_and_ancestor_names(name))
        if not own or is_inside_block or _is_descendant_name(name, taken):
            continue
        caller = nearest_called_module_name(modules, name)
        holds_blocks = any(_is_descendant_name(block, caller) for block in blocks)
        if holds_blocks or any(id(parameter) in left_out for parameter in modules[caller].parameters()):
            continue
        runs[-1] = {key: other for key, other in runs[-1].items() if not _is_descendant_name(key, caller)}
        runs[-1][caller] = modules[caller]
        taken = caller
    return runs if len(runs) > 1 else [*runs, {}]


def _iterate_block_groups(name: str, module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    members = _children_with_parameters(name, module)
    stages = {key: child for key, child in members.items() if _is_stage_of_blocks(child)}
    is_container = isinstance(module, _CONTAINERS)
    if is_container and not stages and (repeated := _repeated_members(name, module)):
        yield repeated
        return
    inner = stages if is_container and stages else members
    for key, child in inner.items():
        if len(stages) == len(members) and not _repeated_members(key, child):
            # [[attention, feed-forward], [attention, feed-forward], ...]
            yield _topmost_called_modules(key, child)
        else:
            yield from _iterate_block_groups(key, child)


def _repeated_members(name: str, container: nn.Module) -> dict[str, nn.Module]:
    """Returns the members whose class occurs twice, or all members of a ModuleList if a class does."""
    members = _children_with_parameters(name, container)
    classes = Counter(type(child) for child in members.values())
    if isinstance(container, nn.ModuleList):
        single = len(members) == 1 and _any_has_submodules(members)  # one layer, possibly used many times
        return members if single or max(classes.values(), default=0) > 1 else {}
    repeated = {key: child for key, child in members.items() if classes[type(child)] > 1}
    composite = {key: child for key, child in repeated.items() if _any_has_submodules({key: child})}
    matrices = {key: child for key, child in repeated.items() if any(p.ndim > 1 for p in child.parameters())}
    return composite or matrices  # repeated vectors, such as norms, are not blocks


def _is_stage_of_blocks(module: nn.Module) -> bool:
    """Returns True if this member of a container is a container that holds blocks or is not called."""
    if not isinstance(module, _CONTAINERS):
        return False
    return not has_forward(module) or _any_has_submodules(_repeated_members("", module))


def _topmost_called_modules(name: str, module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for key, child in _children_with_parameters(name, module).items():
        found |= {key: child} if has_forward(child) else _topmost_called_modules(key, child)
    return found


def _children_with_parameters(name: str, module: nn.Module) -> dict[str, nn.Module]:
    prefix = f"{name}." if name else ""
    return {f"{prefix}{key}": child for key, child in module.named_children() if has_parameters(child)}


def _any_has_submodules(members: Mapping[str, nn.Module]) -> bool:
    return any(True for child in members.values() for _ in child.children())


def _is_descendant_name(name: str, above: str) -> bool:
    """Returns True if the module `name` is below the module `above`. The root's name is empty."""
    return name.startswith(f"{above}.") if above else bool(name)
