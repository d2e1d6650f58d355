"""describe(model, plan): any nn.Module -> ModelSpec, without its weights.

One microbatch runs forward and backward on fake tensors: shapes, no data. Every storage is counted from its
birth to its death, as the allocator would count it, and the count is cut into phases at the points where the
engine acts (a unit's forward and backward begin and end). Parameters stand there in the dtype that units are
gathered in; what the engine itself allocates is not in the trace, but added by `fullshard.planner.memory`.

Operations take their CPU paths, and are not compiled: what `torch.compile` saves is not seen.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.errors import ShardError
from fullshard.sharding.allocations import storage_key
from fullshard.sharding.precision import TORCH_DTYPE, cast_buffers
from fullshard.sharding.recompute import apply_recompute
from fullshard.sharding.trace import LossFunction, Tracer
from fullshard.sharding.units import Predicate, Unit, find_repeated, find_units
from fullshard.spec.model import ModelSpec, ParamSpec, Trace, UnitSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run, Strategy


def describe(
    model: nn.Module,
    plan: Plan | Run,
    *,
    loss: LossFunction,
    batch: Any = None,
    units: Predicate | None = None,
) -> ModelSpec:
    """The spec of `model` (on the meta device or real; it is not changed) as `plan` runs it on one rank.

    The spec holds for every plan with the same units, microbatch, sequence length, precision and recompute,
    whatever its ranks, strategy and accumulation; so a Run will do (microbatch 1 where it leaves it open).
    `loss(model, batch)` is the training loss. `batch`: one microbatch, any nest of tensors, of which only
    shapes and dtypes matter; unset, int64 `tokens` and `labels` of (microbatch, sequence_length).
    `units(name, module)` overrides the plan's unit policy, as in `shard`.

    Raises ShardError for a model that is sharded already.
    """
    plan = _on_one_rank(plan) if isinstance(plan, Run) else plan
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ShardError(
            f"{type(model).__name__} is sharded already.",
            why="each rank's part does not tell the whole",
            fix="describe the model before shard(model, plan)",
        )
    given = find_units(model, plan.run.sharding.units, predicate=units)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _fake_twin(model, given, plan=plan, fakes=fakes)
    found = find_units(twin, plan.run.sharding.units, predicate=units)
    apply_recompute(find_repeated(twin, plan.run.sharding.units, units=found), plan.run.recompute)
    fake_batch = _fake_batch(batch, plan, fakes=fakes)
    tracer = Tracer(twin, found, plan=plan, fakes=fakes)
    phases = tracer.microbatch(loss, fake_batch)
    accumulating = ()
    # Where they are reduced in another dtype, the engine takes the gradients away, and adds them up itself.
    if plan.precision.param == plan.precision.reduce:
        tracer.hold_gradients()
        accumulating = tracer.microbatch(loss, fake_batch)
    return ModelSpec(
        name=type(model).__name__,
        units=tuple(_unit_specs(given, model)),
        buffer_bytes=_bytes(twin.buffers()),
        trace=Trace(
            microbatch=plan.microbatch,
            sequence_length=plan.run.data.sequence_length,
            precision=plan.precision,
            recompute=plan.run.recompute,
            batch_bytes=_bytes(leaf for leaf in tree_leaves(fake_batch) if isinstance(leaf, Tensor)),
            phases=phases,
            accumulating=accumulating,
        ),
    )


def _on_one_rank(run: Run) -> Plan:
    """A plan with the run's settings that a trace depends on."""
    microbatch = run.train.microbatch or 1
    train = run.train.model_copy(update={"microbatch": microbatch, "global_batch": microbatch})
    sharding = run.sharding.model_copy(
        update={"strategy": Strategy.FULL_SHARD, "shard_degree": None, "reshard_to": None}
    )
    alone = run.model_copy(update={"train": train, "sharding": sharding})
    return Plan.from_run(alone, world_size=1, device="cuda" if run.run.device == "cuda" else "cpu")


def _fake_twin(model: nn.Module, units: Sequence[Unit], *, plan: Plan, fakes: FakeTensorMode) -> nn.Module:
    """A copy of the module tree without data; parameters in the dtype that they are gathered in."""
    gathered = {
        id(parameter): TORCH_DTYPE[unit.settings(plan).precision.param]
        for unit in units
        for parameter in unit.parameters.values()
        if parameter.is_floating_point()
    }
    memo: dict[int, Any] = {}
    with fakes:
        for tensor in [*model.parameters(), *model.buffers()]:
            dtype = gathered.get(id(tensor), tensor.dtype)
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
        twin = copy.deepcopy(model, memo)
        cast_buffers(twin, plan.precision)
    return twin


def _fake_batch(batch: Any, plan: Plan, *, fakes: FakeTensorMode) -> Any:
    if batch is None:
        shape = (plan.microbatch, plan.run.data.sequence_length)
        batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}
    with fakes:
        return tree_map_only(
            Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), cast(object, batch)
        )


def _unit_specs(units: Sequence[Unit], model: nn.Module) -> Iterator[UnitSpec]:
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
                    aliases=tuple(alias for alias in names[id(parameter)] if alias != name),
                )
                for name, parameter in unit.parameters.items()
            ),
            is_block=unit.is_block,
            kept=unit.is_root or unit.keep_until_backward,
            override=unit.override,
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
