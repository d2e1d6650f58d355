"""Installs [communication] on FSDP2's units: compressed collectives, and hooks of the user's own.

FSDP2 hands the flat shard of a unit to an all-gather, and the flat gradients for all shards to a
reduce-scatter (`set_custom_all_gather`, `set_custom_reduce_scatter`). The sum over replicas (of hybrid
strategies, and of units that are not sharded) is FSDP2's own all-reduce, and stays as it is.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.agreement import all_gather_object, rank
from fullshard.distributed.collectives import DirectAllGather, EmptyBuffers, gather_parts
from fullshard.distributed.compression import CompressedCommunication, UnitCommunication
from fullshard.distributed.ranges import TimedRange
from fullshard.errors import ShardError
from fullshard.quantities import count_text
from fullshard.spec.plan import MergedUnitSettings, Plan
from fullshard.spec.settings.communication_section import import_hook

logger = logging.getLogger("fullshard")

_COMPRESSED = (torch.float32, torch.bfloat16, torch.float16)  # units of several dtypes are packed as bytes
_ATTRIBUTE = "_fullshard_communication"  # of the model: {unit's name: hook}


class _Hooked(EmptyBuffers):
    def __init__(self, hook: UnitCommunication) -> None:
        self._hook = hook


class HookedAllGather(_Hooked):
    """All-gather by a hook's `gather`; units that are not of one floating-point dtype are sent as is."""

    def __call__(  # FSDP2's signature; the input already lies in its place in the output
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        if input_tensor.dtype not in _COMPRESSED:
            if input_tensor.is_cpu:
                return DirectAllGather()(output_tensor, input_tensor, group, async_op)
            whole = gather_parts(input_tensor, group.group_name, direct=False)
            output_tensor.view(group.size(), -1).copy_(whole)
            return None
        with TimedRange("all_gather"):
            gathered = self._hook.gather(input_tensor, group)
        whole = output_tensor.view(group.size(), -1)
        _check_shape(gathered, whole.shape, what="gather")
        whole.copy_(gathered)  # the own row too: all ranks must compute with the same parameters
        return None


class HookedReduceScatter(_Hooked):
    """Reduce-scatter of a unit by a hook's `reduce`, whose sum is divided if FSDP2 asks for the average."""

    def __call__(  # FSDP2's signature
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ShardError(
                "the hook of [communication] cannot apply FSDP2's factor of gradients.",
                got=f"{op}, after set_gradient_divide_factor",
                why="torch does not say by which number such a reduction multiplies",
                fix="set_force_sum_reduction_for_comms(True) beside it, or a factor in the loss",
            )
        with TimedRange("reduce_scatter"):
            total = self._hook.reduce(input_tensor.view(group.size(), -1), group)
        _check_shape(total, output_tensor.shape, what="reduce")
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


def _check_shape(got: Any, wanted: Sequence[int], *, what: str) -> None:
    shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
    if shape != tuple(wanted):
        raise ShardError(
            f"{what} of the hook of [communication] returned a wrong shape.",
            got=f"{shape}, not {tuple(wanted)}",
            fix="gather returns (ranks, n), reduce returns (n): see docs/communication.md",
        )


def settle_ranks_per_node(plan: Plan) -> Plan:
    """Returns `plan` with the number of ranks per node, of LOCAL_WORLD_SIZE, if `reduce_within` needs it.

    `ranks_per_node` overrides it. If nodes have different numbers of ranks, their greatest common divisor
    counts. Warns if there is only one level, or if nodes of `ranks_per_node` cross hosts. Collective.

    Raises ShardError if neither is set.
    """
    section = plan.run.communication
    if section.reduce_within == "none":
        return plan
    counts = all_gather_object(int(os.environ.get("LOCAL_WORLD_SIZE", "1" if plan.world_size == 1 else "0")))
    of_host = gcd(*counts) if all(counts) else None
    if of_host is None and section.ranks_per_node == "auto":
        raise ShardError(
            "the number of ranks per node is not known.",
            got=f'communication.reduce_within = "{section.reduce_within}", no LOCAL_WORLD_SIZE',
            why="gradients are summed within nodes first",
            fix="communication.ranks_per_node, or torchrun, which sets LOCAL_WORLD_SIZE",
        )
    if rank() == 0 and of_host and section.ranks_per_node != "auto" and of_host % section.ranks_per_node:
        text = "communication.ranks_per_node = %d: sums within nodes cross hosts, which have %s"
        logger.warning(text, section.ranks_per_node, count_text(of_host, "rank"))
    plan = plan.with_ranks_per_node(of_host or 1)
    near = MergedUnitSettings.for_unit(plan, None, kept=False).near_degree
    if rank() == 0 and (near == 1 or (near == plan.shard_degree and section.reduce != "auto")):
        text = "communication.%s has no effect: a node has %d of the %d ranks that shard a parameter"
        logger.warning(text, "reduce_within" if near == 1 else "reduce", near, plan.shard_degree)
    return plan


def install_hook(
    unit: FSDPModule, plan: Plan, *, settings: MergedUnitSettings, number: int
) -> UnitCommunication | None:
    """Makes a unit gather and reduce as [communication] says. Returns its hook; None if nothing is set.

    number: index of the unit, from which its rounding is seeded

    Raises SpecError for a class that is not a hook.
    """
    section = plan.run.communication
    if not section.is_set:
        return None
    if section.hook is None:
        seed = (plan.run.run.seed * 1_000_003 + number) * 65_537 + rank()
        hook = CompressedCommunication(section, near=settings.near_degree, seed=seed % 2**63)
        gathers, reduces = section.gather != "auto", section.changes_sums
    else:
        hook = cast(UnitCommunication, import_hook(section.hook))
        gathers, reduces = hasattr(hook, "gather"), hasattr(hook, "reduce")
    if gathers:
        unit.set_custom_all_gather(cast(Any, HookedAllGather(hook)))
    if reduces:
        unit.set_custom_reduce_scatter(cast(Any, HookedReduceScatter(hook)))
    return hook


def set_hooks(model: nn.Module, hooks: Mapping[str, UnitCommunication]) -> None:
    """Stores the hooks of a model's units by name, where `find_hooks` finds them."""
    setattr(model, _ATTRIBUTE, dict(hooks))


def find_hooks(model: nn.Module) -> Mapping[str, UnitCommunication]:
    """Returns the hooks of a model's units by name; none if nothing is compressed."""
    return getattr(model, _ATTRIBUTE, {})
