"""Specs of a model's units and parameters."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fullshard.sharding.fp8 import Fp8Choice
from fullshard.sharding.units import Unit
from fullshard.spec.model import ParamSpec, UnitSpec


def parameters_gathered_in_fp8(fp8: Fp8Choice | None) -> set[int]:
    """Returns the `id` of each parameter that is gathered in fp8."""
    if fp8 is None or fp8.scaling != "tensorwise":
        return set()
    return {id(module.weight) for module in fp8.linears.values()}


def unit_and_parameter_specs(
    units: Sequence[Unit],
    model: nn.Module,
    *,
    fp8: Fp8Choice | None,
    divided: Mapping[str, int | None],
) -> Iterator[UnitSpec]:
    """Yields the spec of each unit. `divided`: the dim in which ranks divide each parameter, if any."""
    in_fp8 = parameters_gathered_in_fp8(fp8)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    registered = [module for module in model.modules() if any(module is unit.modules[0] for unit in units)]
    for unit in units:
        yield UnitSpec(
            name=unit.name,
            position=next(i for i, module in enumerate(registered) if module is unit.modules[0]),
            parameters=tuple(
                ParamSpec(
                    name=name,
                    shape=tuple(parameter.shape),
                    itemsize=parameter.itemsize,
                    is_floating=parameter.is_floating_point(),
                    requires_grad=parameter.requires_grad,
                    is_gathered_in_fp8=id(parameter) in in_fp8,
                    aliases=tuple(alias for alias in names[id(parameter)] if alias != name),
                    divided_dim=divided.get(name),
                )
                for name, parameter in unit.parameters.items()
            ),
            is_block=unit.is_block,
            kept=unit.is_root or unit.keep_until_backward,
            override=unit.override,
            is_embedding=unit.is_embedding,
            has_experts=unit.has_experts,
        )
