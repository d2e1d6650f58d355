"""FSDP2's own switches of communication, as the section [fsdp] asks for them."""

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.errors import SpecError
from fullshard.spec.fsdp_section import FsdpSection
from fullshard.spec.plan import DeviceType

# Setting: (method of FSDPModule, first torch that has it, whether it needs NCCL).
_SWITCHES = {
    "separate_reduce_scatter_group": ("set_separate_reduce_scatter_group", "2.13", False),
    "reduce_scatter_buffers": ("set_reduce_scatter_max_input_buffers", "2.13", False),
    "symmetric_memory": ("set_symm_mem_for_comm", "2.12", True),
    "allocate_from_process_group": ("set_allocate_memory_from_process_group_for_comm", "2.11", True),
}


def check_switches(section: FsdpSection, device: DeviceType) -> None:
    """Raises SpecError for a setting that this torch or the ranks' device does not have."""
    for setting in _settings_in_use(section):
        method, first, needs_nccl = _SWITCHES[setting]
        if needs_nccl and device != "cuda":
            raise SpecError(
                "this setting is for ranks on GPUs.",
                got=f"{_text_of(section, setting)}, ranks on {device}",
                why="the memory is NCCL's",
                fix='run.device = "cuda", or leave the setting out',
            )
        if not hasattr(FSDPModule, method):
            raise SpecError(
                f"this torch has no {method}.",
                got=_text_of(section, setting),
                fix=f"torch {first} or newer, or leave the setting out",
            )


def apply_local_switches(module: FSDPModule, section: FsdpSection) -> None:
    """Sets on one unit what needs no other rank: its number of buffers."""
    if section.reduce_scatter_buffers > 1:
        module.set_reduce_scatter_max_input_buffers(section.reduce_scatter_buffers, recurse=False)


def apply_group_switches(model: nn.Module, section: FsdpSection) -> None:
    """Sets on all units what concerns process groups and their memory. Collective."""
    if section.separate_reduce_scatter_group:
        cast(FSDPModule, model).set_separate_reduce_scatter_group()
    for module in model.modules():
        if isinstance(module, FSDPModule) and section.symmetric_memory:
            module.set_symm_mem_for_comm()
        elif isinstance(module, FSDPModule) and section.allocate_from_process_group:
            module.set_allocate_memory_from_process_group_for_comm(True)


def _settings_in_use(section: FsdpSection) -> list[str]:
    plain = FsdpSection()
    return [name for name in _SWITCHES if getattr(section, name) != getattr(plain, name)]


def _text_of(section: FsdpSection, setting: str) -> str:
    return f"fsdp.{setting} = {str(getattr(section, setting)).lower()}"
