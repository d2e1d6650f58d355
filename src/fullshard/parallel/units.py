"""Divides a model into communication units, whose parameters are gathered, used and freed together."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from fullshard.distributed.tensors import is_experts
from fullshard.errors import ShardError
from fullshard.models.adapters import iterate_adapted_layers, reads_base_weight
from fullshard.parallel.blocks import (
    called_modules_with_parameters,
    find_repeated_blocks,
    group_modules_around_blocks,
    has_parameters,
    name_and_ancestor_names,
    nearest_called_module_name,
)
from fullshard.parallel.model_parameters import check_parameters
from fullshard.quantities import join_names
from fullshard.spec.plan import MergedUnitSettings, Plan
from fullshard.spec.run import UnitOverride, UnitSection

Predicate = Callable[[str, nn.Module], bool]
NamedModules = Mapping[str, nn.Module]
ROOT = "(root)"


@dataclass(eq=False)
class Unit:
    """A communication unit: modules that are gathered together, and the parameters of this unit only."""

    name: str  # the names of the modules, joined by `+`
    modules: tuple[nn.Module, ...]
    is_block: bool = False  # whether it was chosen as a repeated block, or by name, size or predicate
    keep_until_backward: bool = False  # whether its backward comes right after its forward
    override: UnitOverride | None = None  # the override of `sharding.units` that applies to it
    is_embedding: bool = False  # whether it only looks up rows, so that backward does not need its parameters
    has_experts: bool = False  # whether its parameters are experts, which `expert_parallel` may divide
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])

    @property
    def is_root(self) -> bool:
        return self.name == ROOT

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def is_sharded(self) -> bool:
        """False if its parameters stay whole under any strategy."""
        return self.override is None or self.override.strategy is None

    @property
    def may_lack_gradients(self) -> bool:
        """True if some parameters may get no gradient on a rank whose tokens went to other experts."""
        return any("experts" in name.split(".") for name in self.parameters)

    def settings(self, plan: Plan) -> MergedUnitSettings:
        """Returns the unit's settings: the plan's, with the unit's override applied."""
        kept = self.is_root or self.keep_until_backward
        return MergedUnitSettings.for_unit(
            plan, self.override, kept=kept, is_embedding=self.is_embedding, has_experts=self.has_experts
        )


def find_units(model: nn.Module, section: UnitSection, *, predicate: Predicate | None = None) -> list[Unit]:
    """Returns the units of `model` in order of registration, inner units before outer ones, the root last.

    Every parameter that has a dimension to shard belongs to exactly one unit. If modules of two units share a
    parameter (tied weights), all modules that hold it form a unit of their own, or are in the root. A module
    that occurs in two units also becomes a unit of its own.

    Raises ShardError if there is nothing to shard, no repeated block is found, or a name matches no module.
    """
    check_parameters(model)
    paths = dict(model.named_modules(remove_duplicate=False))
    chosen = _choose_units(model, section, predicate=predicate)
    _make_units_disjoint(paths, chosen)
    units = [*_sort_units_innermost_first(paths, chosen), Unit(ROOT, (model,))]
    owners = _innermost_unit_by_module_path(dict(model.named_modules()), units[:-1])
    for name, parameter in model.named_parameters():
        if parameter.ndim > 0:  # scalars stay whole, and are in no unit
            unit = owners[name.rpartition(".")[0]] or units[-1]
            unit.parameters[name] = parameter
    units = [unit for unit in units if unit.parameters or unit.is_root]
    _set_overrides(units, section.overrides)
    recomputed = {m for b in find_recompute_and_compile_blocks(model, units=units) for m in b.modules()}
    for unit in units:
        unit.is_embedding = _is_single_embedding(unit) and unit.modules[0] not in recomputed
    experts = _expert_parameter_ids(model)
    for unit in units:
        held = {id(parameter) for parameter in unit.parameters.values()}
        unit.has_experts = bool(held) and held <= experts
    return units


def check_experts_are_separate(units: Iterable[Unit], model: nn.Module) -> None:
    """Raises ShardError if a unit has both experts and other parameters, since their meshes differ."""
    experts = _expert_parameter_ids(model)
    mixed = [
        unit
        for unit in units
        if not unit.has_experts and not experts.isdisjoint(map(id, unit.parameters.values()))
    ]
    if mixed:
        raise ShardError(
            f"the experts in {mixed[0].name} are not a unit of their own.",
            got="sharding.expert_parallel or sharding.tensor_parallel above 1, and sharding.units that join "
            "experts with other modules",
            why="experts are sharded over other ranks than the modules around them",
            fix="no sharding.units.names and min_parameters, or names of the experts too",
        )


def check_adapters_are_with_their_base(units: Iterable[Unit], model: nn.Module) -> None:
    """Raises ShardError if an adapter computes with a base weight that another unit gathers."""
    unit_of = {id(one): unit for unit in units for one in unit.parameters.values() if not unit.is_root}
    for name, layer in iterate_adapted_layers(model):
        found = {unit_of[id(one)].name for one in layer.parameters() if id(one) in unit_of}
        if reads_base_weight(layer) and len(found) > 1:
            raise ShardError(
                f"the adapter of {name} is in another unit than its base weight.",
                got=f"sharding.units that make units of {join_names(sorted(found))}",
                why="adapters of parameters and DoRA compute with the base weight itself",
                fix="no sharding.units.names and min_parameters, or the names of blocks alone",
            )


def _expert_parameter_ids(model: nn.Module) -> set[int]:
    return {id(p) for module in model.modules() if is_experts(module) for p in module.parameters()}


def _is_single_embedding(unit: Unit) -> bool:
    """Returns whether the unit is one embedding, whose gradient needs the tokens and not the table."""
    module = unit.modules[0]
    return (
        len(unit.modules) == 1
        and type(module) is nn.Embedding
        and list(unit.parameters.values()) == [module.weight]
    )


def find_recompute_and_compile_blocks(model: nn.Module, *, units: Sequence[Unit]) -> list[nn.Module]:
    """Returns the blocks that recompute and compilation apply to: the repeated blocks.

    If the model has none, these are the outermost modules chosen as units.
    """
    if blocks := find_repeated_blocks(model):
        return list(blocks.values())
    chosen = [module for unit in units if unit.is_block for module in unit.modules]
    inner = {module for outer in chosen for module in outer.modules() if module is not outer}
    return [module for module in chosen if module not in inner]


def find_blocks_with_units_inside(blocks: Iterable[nn.Module], units: Iterable[Unit]) -> set[nn.Module]:
    """Returns the blocks that hold other units. These gather in the middle of the block."""
    holders = {module for unit in units if not unit.is_root for module in unit.modules}
    return {one for one in blocks if any(m in holders for m in one.modules() if m is not one)}


# Policies #
def _choose_units(model: nn.Module, section: UnitSection, *, predicate: Predicate | None) -> list[Unit]:
    if predicate is not None:
        named = {name: m for name, m in called_modules_with_parameters(model).items() if predicate(name, m)}
        return _make_unit_per_module(named, what="the units predicate")
    if section.min_parameters is not None:
        return _choose_units_by_min_size(model, section.min_parameters)
    if section.names:
        modules, patterns = called_modules_with_parameters(model), section.names
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise ShardError(
                    f"no module that is called matches {pattern!r}.",
                    got=f"sharding.units.names = {list(patterns)}",
                    fix=f"names like {', '.join(list(modules)[:4])} (* stands for anything)",
                )
        named = {key: m for key, m in modules.items() if any(_is_outermost_match(key, p) for p in patterns)}
        return _make_unit_per_module(named, what="sharding.units.names")
    return _choose_units_by_block(model)


def _choose_units_by_block(model: nn.Module) -> list[Unit]:
    blocks = find_repeated_blocks(model)
    if not blocks:
        raise ShardError(
            f"{type(model).__name__} has no repeated block to make units of.",
            why="one unit for the whole model would be gathered at once, and save nothing while it computes",
            fix="sharding.units.min_parameters = 10_000_000, or sharding.units.names = [...]",
        )
    units = [Unit(name, (block,), is_block=True) for name, block in blocks.items()]
    units += _make_expert_units(model, blocks)
    paths = dict(model.named_modules(remove_duplicate=False))
    runs = group_modules_around_blocks(model, blocks, left_out=set(_find_holders_of_tied_parameters(paths)))
    for run in runs:
        # A run of vectors only (a norm) is not worth a collective: the root holds it.
        if any(parameter.ndim > 1 for module in run.values() for parameter in module.parameters()):
            units += _make_units_around_blocks(paths, run, is_last_run=run is runs[-1])
    return units


def _make_units_around_blocks(paths: NamedModules, run: NamedModules, *, is_last_run: bool) -> list[Unit]:
    """Makes one unit of the run's modules, except modules called from several places: one unit of each."""
    places = Counter(paths.values())
    alone = {name: module for name, module in run.items() if places[module] > 1}
    together = {name: module for name, module in run.items() if name not in alone}
    units = [Unit(name, (module,)) for name, module in alone.items()]
    if together:
        units.append(Unit("+".join(together), tuple(together.values()), keep_until_backward=is_last_run))
    return units


def _make_expert_units(model: nn.Module, blocks: NamedModules) -> list[Unit]:
    """Makes units of the modules named `experts`, so that they are separate from their block's attention.

    A rank does not call an expert that its tokens did not reach, while the other ranks would wait for it in
    the expert's all-gather. So all experts of a block form one unit. If `experts` is a list, which is never
    called, the unit is the module that holds the list; if that is the block, the experts stay in the block.
    """
    modules = dict(model.named_modules())
    experts = [
        name
        for name, module in modules.items()
        if name.endswith(".experts") and ".experts." not in name and has_parameters(module)
    ]
    calling = {nearest_called_module_name(modules, name) for name in experts}
    return [
        Unit(name, (module,))
        for name, module in modules.items()
        if name in calling and any(name.startswith(f"{block}.") for block in blocks)
    ]


def _choose_units_by_min_size(model: nn.Module, min_parameters: int) -> list[Unit]:
    """Makes units bottom up: a module whose parameters outside of lower units reach `min_parameters`."""
    units: list[Unit] = []
    taken: set[int] = set()
    called = set(called_modules_with_parameters(model).values())

    def make_units_bottom_up(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            make_units_bottom_up(f"{name}.{key}" if name else key, child)
        rest = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if module in called and sum(rest.values()) >= min_parameters:
            units.append(Unit(name, (module,), is_block=True))
            taken.update(rest)

    make_units_bottom_up("", model)
    return units


def _is_outermost_match(name: str, pattern: str) -> bool:
    """Returns True if `name` matches and no ancestor's name does: `blocks.*` matches only the blocks."""
    return [one for one in name_and_ancestor_names(name) if fnmatchcase(one, pattern)] == [name]


def _make_unit_per_module(named: NamedModules, *, what: str) -> list[Unit]:
    if not named:
        raise ShardError(f"{what} chose no module.", fix="a rule that is true for the repeated blocks")
    return [Unit(name, (module,), is_block=True) for name, module in named.items()]


# Sharing #
def _make_units_disjoint(paths: NamedModules, units: list[Unit]) -> None:
    """Changes `units` in place until no module and no parameter is in two units; the root counts as a unit.

    A module in two units becomes a unit of its own. The modules that hold one parameter are joined into one
    unit, because a tied weight in two `fully_shard` calls would be sharded twice, and its two copies would
    drift apart (accelerate#4171, torchtitan#2495). Parameters that the root itself reads stay in the root,
    and so do all modules on the path to them.
    """
    names = {module: name for name, module in paths[""].named_modules()}
    tied = list(_find_holders_of_tied_parameters(paths).values())
    free = {paths[""]}  # modules that no unit may hold
    while True:
        owners = _innermost_unit_by_module_path(paths, units)
        torn = _find_module_in_two_units(paths, owners)
        holders = next((one for one in tied if len({owners[names[module]] for module in one}) > 1), None)
        if torn is not None:
            units.append(Unit(names[torn], (torn,)))
        elif holders is None:
            return
        elif holders & free:
            held = [name for name, module in paths.items() if module in holders]
            free |= {paths[above] for name in held for above in name_and_ancestor_names(name)}
            units[:] = [unit for unit in units if not free & set(unit.modules)]
        else:
            joined = [unit for unit in units if holders & set(unit.modules)]
            modules = holders.union(*(unit.modules for unit in joined))
            units[:] = [unit for unit in units if unit not in joined]
            units.append(_make_joined_unit(modules, names))


def _find_module_in_two_units(paths: NamedModules, owners: Mapping[str, Unit | None]) -> nn.Module | None:
    seen: dict[nn.Module, Unit | None] = {}
    for name, module in paths.items():
        apart = seen.setdefault(module, owners[name]) is not owners[name]
        if apart and nearest_called_module_name(paths, name) == name and has_parameters(module):
            return module
    return None


def _make_joined_unit(modules: set[nn.Module], names: Mapping[nn.Module, str]) -> Unit:
    ordered = {name: module for module, name in names.items() if module in modules}
    return Unit("+".join(ordered), tuple(ordered.values()))


def _find_holders_of_tied_parameters(paths: NamedModules) -> dict[int, set[nn.Module]]:
    """Returns id(parameter) -> the called modules that hold it, for parameters with several such modules."""
    holders: dict[int, set[nn.Module]] = defaultdict(set)
    for name, module in paths.items():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(paths[nearest_called_module_name(paths, name)])
    return {key: modules for key, modules in holders.items() if len(modules) > 1}


def _innermost_unit_by_module_path(paths: NamedModules, units: Iterable[Unit]) -> dict[str, Unit | None]:
    """Returns module path -> the innermost unit that contains the module there; None stands for the root."""
    by_module = {module: unit for unit in units for module in unit.modules}
    owners: dict[str, Unit | None] = {}
    for name, module in paths.items():
        parent = owners.get(name.rpartition(".")[0]) if name else None
        owners[name] = by_module.get(module, parent)
    return owners


# Order #
def _sort_units_innermost_first(paths: NamedModules, units: Sequence[Unit]) -> list[Unit]:
    """Sorts units in order of registration, inner units before outer ones. Joins units inside each other."""
    names = {module: name for name, module in paths[""].named_modules()}
    position = {module: i for i, module in enumerate(names)}
    units = sorted(units, key=lambda unit: min(position[module] for module in unit.modules))
    inside = _units_inside_each_unit(paths, units)
    for unit in units:
        # Units that are inside each other (crossed tied weights) can only be gathered as one unit.
        ring = [other for other in inside[unit] if other is not unit and unit in inside[other]]
        if ring:
            joined = _make_joined_unit({module for one in (unit, *ring) for module in one.modules}, names)
            rest = [other for other in units if other is not unit and other not in ring]
            return _sort_units_innermost_first(paths, [*rest, joined])
    ordered: dict[Unit, None] = {}

    def place_after_inner_units(unit: Unit) -> None:
        for inner in units:
            if inner in inside[unit]:
                place_after_inner_units(inner)
        ordered.setdefault(unit)

    for unit in units:
        place_after_inner_units(unit)
    owners = _innermost_unit_by_module_path(paths, units)
    for unit in ordered:
        # Only the outermost modules are listed; the unit's modules inside them are gathered with them.
        apart = {paths[name] for name in paths if owners.get(name.rpartition(".")[0]) is not unit or not name}
        if outermost := [module for module in unit.modules if module in apart]:
            unit.modules, unit.name = tuple(outermost), "+".join(names[module] for module in outermost)
    return list(ordered)


def _units_inside_each_unit(paths: NamedModules, units: Sequence[Unit]) -> dict[Unit, set[Unit]]:
    by_module = {module: unit for unit in units for module in unit.modules}
    inside: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    around: dict[str, frozenset[Unit]] = {}
    for name, module in paths.items():
        own = by_module.get(module)
        outer = around[name.rpartition(".")[0]] if name else frozenset[Unit]()
        if own is not None:
            for unit in outer - {own}:
                inside[unit].add(own)
            outer |= {own}
        around[name] = outer
    for found in inside.values():
        left = list(found)
        while left:
            new = inside[left.pop()] - found
            found |= new
            left += new
    return inside


def _set_overrides(units: Sequence[Unit], overrides: Sequence[UnitOverride]) -> None:
    """Sets each unit's override, the last that matches. Raises ShardError for one that matches no unit."""
    for override in overrides:
        own = [unit for unit in units if any(fnmatchcase(n, override.match) for n in unit.name.split("+"))]
        for unit in own:
            unit.override = override
        if not own:
            raise ShardError(
                f"sharding.units.overrides: no unit matches {override.match!r}.",
                fix=f"one of {', '.join(unit.name for unit in units[:6])}",
            )
