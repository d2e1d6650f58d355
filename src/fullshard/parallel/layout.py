"""A table of a model's parameters: units, shapes and placements on this rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import local_tensor
from fullshard.quantities import format_bytes, format_count
from fullshard.torch_private.fsdp import unit_state


@dataclass(frozen=True)
class ShardingTableRow:
    """One parameter, with its unit, and its shape, placement and bytes on this rank."""

    unit: str
    parameter: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    device: str
    placement: str
    trainable: bool
    local_bytes: int
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter


@dataclass(frozen=True)
class ShardingTable:
    """The rows of all parameters of a model. `str()` gives a table with one line per parameter."""

    rows: tuple[ShardingTableRow, ...]

    def __iter__(self) -> Iterator[ShardingTableRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def local_bytes(self) -> int:
        return sum(row.local_bytes for row in self.rows)

    def __str__(self) -> str:
        header = ("unit", "parameter", "global", "local", "dtype", "device", "placement", "")
        table = [header, *(_row_cell_texts(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        numel = sum(prod(row.global_shape) for row in self.rows)
        total = f"{format_count(numel)} parameters in {len({row.unit for row in self.rows})} units; "
        return "\n".join([*lines, total + f"this rank holds {format_bytes(self.local_bytes)}"])


def sharding_table(model: nn.Module) -> ShardingTable:
    """Returns the unit, shapes, dtype, device and placement of each parameter of `model` on this rank.

    In an unsharded module, every parameter is whole and in no unit.

    >>> print(fs.sharding_table(model))
    unit  parameter  global  local  dtype  device  placement
    ...
    """
    units = _unit_name_by_module_name(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return ShardingTable(tuple(_parameter_row(p, names[id(p)], units=units) for p in model.parameters()))


def _parameter_row(parameter: nn.Parameter, names: list[str], *, units: dict[str, str]) -> ShardingTableRow:
    local = local_tensor(parameter)
    placement = "whole"
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
        placement = " ".join(f"{axis}={p}" for axis, p in zip(axes, parameter.placements, strict=True))
    return ShardingTableRow(
        unit=units.get(names[0].rpartition(".")[0], ""),
        parameter=names[0],
        global_shape=tuple(parameter.shape),
        local_shape=tuple(local.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(local.device),
        placement=placement,
        trainable=parameter.requires_grad,
        local_bytes=local.numel() * local.element_size(),
        aliases=tuple(names[1:]),
    )


def _unit_name_by_module_name(model: nn.Module) -> dict[str, str]:
    """Returns module name -> unit name. The modules of a unit share one FSDP2 state object."""
    grouped: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            grouped.setdefault(id(unit_state(module)), []).append(name or "(root)")
    own = {name: "+".join(names) for names in grouped.values() for name in names}
    units: dict[str, str] = {}
    for name, _ in model.named_modules():
        parent = units.get(name.rpartition(".")[0], "") if name else ""
        units[name] = own.get(name or "(root)", parent)
    return units


def _row_cell_texts(row: ShardingTableRow) -> tuple[str, ...]:
    notes = ([] if row.trainable else ["frozen"]) + [f"= {alias}" for alias in row.aliases]
    shapes = ("×".join(map(str, shape)) or "scalar" for shape in (row.global_shape, row.local_shape))
    return (row.unit, row.parameter, *shapes, row.dtype, row.device, row.placement, ", ".join(notes))
