"""Sets the values of a module that was sharded on the meta device: initialised values, or rank 0's.

[Note: the same values at any rank count]
Modules initialise whole parameters, and each rank then cuts out its shard. Only one unit at a time is whole.
The other parameters are on the meta device meanwhile, where writes cost nothing, so that a module may
initialise parameters of several units.

Every random operation is seeded with the run's seed, the name of the module whose initialiser runs, and the
number of random operations that the initialiser has run before, including those on the meta device. So values
depend neither on ranks nor strategy nor units. (DTensor's own random operators do not work on CPU meshes, and
give each mesh its own numbers.)
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from fullshard.distributed.shard_boxes import own_box
from fullshard.distributed.tensors import detached_local_tensor, dtensor_from_local_part, local_tensor
from fullshard.errors import ShardError
from fullshard.models.adapters import set_magnitudes
from fullshard.models.packed_weights import find_packed_weights, pack_rows
from fullshard.parallel.model_parameters import TORCH_DTYPE, Rank0Values, replace_by_id
from fullshard.parallel.unit_events import reshard_unsharded_units
from fullshard.parallel.units import Unit
from fullshard.spec.plan import Plan
from fullshard.torch_private import tensors
from fullshard.torch_private.fake_tensors import TorchDispatchMode

Initialise = Callable[[nn.Module], object]


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Makes modules built in this context put parameters on the meta device, and compute buffers as usual.

    Use it for modules that fill buffers in their constructor and cannot fill them again later. It replaces
    `nn.Module.register_parameter`, so other threads must not build modules at the same time.

    >>> with fs.parameters_on_meta():
    ...     norm = torch.nn.BatchNorm1d(4)
    >>> norm.weight.device.type, norm.running_var.device.type
    ('meta', 'cpu')
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:  # signature: torch
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def replace_parameters_by_meta(model: nn.Module, units: Sequence[Unit], *, plan: Plan) -> None:
    """Replaces every parameter by one on the meta device, trainable ones in their unit's master dtype.

    Tied parameters stay tied. Frozen parameters keep their dtype, since they have no updates that rounding
    could lose. `allocate_and_fill_shards` makes real parameters again, also of unsharded scalars.
    """
    masters: dict[int, torch.dtype] = {}
    for unit in units:
        master = TORCH_DTYPE[unit.settings(plan).precision.master]
        masters |= {id(p): master for p in unit.parameters.values()}
    whole_run = TORCH_DTYPE[plan.precision.master]
    replaced: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        trainable = parameter.requires_grad and parameter.is_floating_point()
        dtype = masters.get(id(parameter), whole_run) if trainable else parameter.dtype
        data = torch.empty_like(parameter, device="meta", dtype=dtype, memory_format=torch.contiguous_format)
        replaced[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    replace_by_id(model, replaced)
    for unit in units:
        unit.parameters = {name: replaced[id(p)] for name, p in unit.parameters.items()}


def allocate_and_fill_shards(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    values: Rank0Values,
    plan: Plan,
    init: Initialise | Literal["none"] | None,
    keep: Callable[[Mapping[str, nn.Parameter]], None] | None = None,
) -> None:
    """Allocates the shards and sets their values, unit by unit, and then sets the buffers.

    See [Note: the same values at any rank count]. Raises ShardError for parameters and buffers that nothing
    initialises.

    values: rank 0's values, removed as they are used, so that rank 0 frees what it has sent
    init: initialiser of the parameters that `values` lacks; with "none" they are NaN until a load
    keep: called with the parameters of each unit, once they are set
    """
    initialise = None if init == "none" else init
    filler = _ModelValueSetter(model, local_device(plan), seed=plan.run.run.seed, init=initialise)
    initialised = [] if init == "none" else [one for one in filler.parameters if one not in values.tensors]
    with filler.parameters_replaced_by_meta():
        for unit in units:
            missing = [name for name in filler.parameter_names_in_unit(unit) if name not in values.tensors]
            if init == "none":
                filler.allocate_shards_without_values(missing)
            whole = {} if init == "none" else filler.initialise_whole_parameters(missing)
            filler.set_unit_shards(unit, whole, values=values)
            if keep is not None:
                keep(unit.parameters)
    set_magnitudes(model, initialised)
    filler.set_or_recompute_buffers(values)


def initialise_parameters(
    model: nn.Module, names: Iterable[str], *, plan: Plan, init: Initialise | None = None
) -> None:
    """Sets the parameters `names` of a model, sharded or not, to the values that `shard` would give them.

    See [Note: the same values at any rank count]. One module's parameters at a time are whole. Raises
    ShardError for names that the model does not have, and for parameters that nothing initialises.
    """
    reshard_unsharded_units(model)
    filler = _ModelValueSetter(model, local_device(plan), seed=plan.run.run.seed, init=init)
    holders: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name not in filler.parameters:
            raise ShardError(f"{_class_name_before_sharding(model)} has no parameter {name}.")
        holders[name.rpartition(".")[0]].append(name)
    with filler.parameters_replaced_by_meta():
        for own in holders.values():
            for name, whole in filler.initialise_whole_parameters(own).items():
                parameter = filler.parameters[name]
                part = _cut_shard_like_parameter(whole, parameter)
                detached_local_tensor(parameter).copy_(detached_local_tensor(part))


def materialize(
    model: nn.Module, *, seed: int, device: torch.device | None = None, init: Initialise | None = None
) -> nn.Module:
    """Gives an unsharded model on the meta device exactly the values that `shard` would, in this process.

    Returns the same model. Raises ShardError for parameters and buffers that nothing initialises.

    >>> with torch.device("meta"):
    ...     whole = fs.DecoderModel(run.decoder_config)
    >>> whole = fs.materialize(whole, seed=run.run.seed)  # the values of `fs.shard(model, plan)`
    """
    filler = _ModelValueSetter(model, device or torch.device("cpu"), seed=seed, init=init)
    with filler.parameters_replaced_by_meta():
        for name, whole in filler.initialise_whole_parameters(list(filler.parameters)).items():
            old = filler.parameters[name]
            filler.parameters[name] = nn.Parameter(whole.to(old.dtype), requires_grad=old.requires_grad)
    set_magnitudes(model, filler.parameters)
    filler.set_or_recompute_buffers(Rank0Values())
    return model


def _iterate_modules_post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yields modules after their children. A model may have an `apply` of its own."""
    for child in module.children():
        yield from _iterate_modules_post_order(child)
    yield module


class _ModelValueSetter:
    """Sets the parameters and buffers of one model.

    parameters: the model's parameters, each by its first name
    slots: parameter name -> every (module, key) under which it is registered
    stand_ins: parameter name -> a meta parameter, registered in its place while other units are set
    """

    def __init__(self, model: nn.Module, device: torch.device, *, seed: int, init: Initialise | None) -> None:
        self.model, self.device, self.seed = model, device, seed
        self.init = init or getattr(model, "_init_weights", None)
        self.explicit = init is not None
        # What the constructor of a model that this package builds computes; see `models.meta_init`.
        self.tape = None if self.explicit else getattr(model, "_constructor_tape", None)
        self.names = {module: name for name, module in model.named_modules()}
        self.order = list(dict.fromkeys(_iterate_modules_post_order(model)))
        self.parameters = dict(model.named_parameters())
        self.parents: dict[nn.Module, set[nn.Module]] = defaultdict(set)
        self.slots: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
        first_names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in model.modules():
            for child in module.children():
                self.parents[child].add(module)
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self.slots[first_names[id(parameter)]].append((module, key))
        self.stand_ins = {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False)
            for name, p in self.parameters.items()
        }
        self.packed = find_packed_weights(model)
        for name, packed in self.packed.items():  # initialisers write the matrix itself
            self.stand_ins[name] = nn.Parameter(torch.empty(packed.shape, device="meta"), requires_grad=False)

    @contextmanager
    def parameters_replaced_by_meta(self) -> Generator[None]:
        """Context in which modules have stand-ins. Afterwards they have `parameters`."""
        self.register_parameters(self.stand_ins)
        try:
            yield
        finally:
            self.register_parameters(self.parameters)

    def register_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Registers `parameters`, by name, in all modules that hold the parameter of that name."""
        for name, parameter in parameters.items():
            for module, key in self.slots[name]:
                tensors.registered_parameters(module)[key] = parameter

    def parameter_names_in_unit(self, unit: Unit) -> list[str]:
        """Returns the names of the unit's parameters; for the root, also of scalars, which are in no unit."""
        scalars = [name for name, p in self.parameters.items() if p.ndim == 0] if unit.is_root else []
        return [*scalars, *unit.parameters]

    def set_unit_shards(self, unit: Unit, whole: dict[str, Tensor], *, values: Rank0Values) -> None:
        """Sets a unit's shards from `whole`, or else from `values`. Removes the values that it uses."""
        for name in self.parameter_names_in_unit(unit):
            if name in whole or name in values.tensors:
                value = whole.pop(name) if name in whole else values.broadcast_and_remove(name, self.device)
                self._set_parameter_data(name, _cut_shard_like_parameter(value, self.parameters[name]))
        for name in unit.parameters:
            unit.parameters[name] = self.parameters[name]

    def _set_parameter_data(self, name: str, data: Tensor) -> None:
        """Sets a parameter's data. A DTensor stays the same object, as FSDP2 needs; a scalar is replaced."""
        old = self.parameters[name]
        new = nn.Parameter(data, requires_grad=old.requires_grad)
        if isinstance(old, DTensor):
            torch.utils.swap_tensors(old, new)  # `.data =` cannot leave the meta device
        else:
            self.parameters[name] = new

    def allocate_shards_without_values(self, names: Sequence[str]) -> None:
        """Allocates the shards of these parameters without values: NaN."""
        for name in names:
            old = self.parameters[name]
            local = torch.empty(local_tensor(old).shape, dtype=old.dtype, device=self.device)
            _fill_nan(local)
            if name in self.packed:
                local.fill_(255)  # the factors of the rows are NaN
            data = dtensor_from_local_part(old, local) if isinstance(old, DTensor) else local
            self._set_parameter_data(name, data)

    def initialise_whole_parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Runs the initialisers of these parameters. Returns whole values by name, in fp32 if trainable."""
        if not names:
            return {}
        likes = {name: (self.stand_ins if name in self.packed else self.parameters)[name] for name in names}
        self.register_parameters({name: _nan_parameter(one, self.device) for name, one in likes.items()})
        holders = {module for name in names for module, _ in self.slots[name]}
        self._run_initialisers(_with_ancestors(holders, self.parents))
        whole: dict[str, Tensor] = {}
        for name in names:
            module, key = self.slots[name][0]
            # Read from the module: an initialiser may have replaced the parameter.
            whole[name] = cast(Tensor, tensors.registered_parameters(module)[key]).detach()
        self.register_parameters(self.stand_ins)
        self._check_initialised(whole)
        whole |= {name: pack_rows(whole[name], self.packed[name]) for name in names if name in self.packed}
        return whole

    def _run_initialisers(self, concerned: set[nn.Module]) -> None:
        """Initialises the modules `concerned`, children before parents, as `nn.Module.apply` does."""
        for module in concerned:
            self._check_parametrizations_have_buffers(module)
        parametrized = _write_through_parametrizations(self.order, written=concerned)
        with _preserve_random_states(self.device), torch.no_grad(), parametrized:
            for module in self.order:
                if module in concerned:
                    seed = _derive_seed(self.seed, self.names[module])
                    random.seed(seed)  # for initialisers that use Python's or NumPy's generator
                    np.random.seed(seed % 2**32)
                    with _SeedEachRandomOperation(self.seed, self.names[module], device=self.device):
                        self._initialise_module(module)
                    if self.tape is not None:
                        self.tape.set_parameters_by_replay(module, seed=self.seed)

    def _initialise_module(self, module: nn.Module) -> None:
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        try:
            if own is not None and not self.explicit:
                own()
            if self.init is not None:
                self.init(module)
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            raise ShardError(
                f"{self.names[module] or type(module).__name__} cannot be initialised unit by unit.",
                got=str(error).splitlines()[0],
                why="its initialiser reads values of another unit, which are not there at the time",
                fix="fullshard.shard(model, plan, init=...), or a model that holds its weights",
            ) from error

    def _check_initialised(self, whole: Mapping[str, Tensor]) -> None:
        for name, tensor in whole.items():
            if _has_nan(tensor):
                holder = self.model.get_submodule(name.rpartition(".")[0])
                raise ShardError(
                    f"{name} was not initialised.",
                    got=f"{_class_name_before_sharding(holder)} on meta; no reset_parameters sets it",
                    why="its memory is uninitialised",
                    fix="fullshard.shard(model, plan, init=...), or a model that holds its weights",
                )

    def set_or_recompute_buffers(self, values: Rank0Values) -> None:
        """Sets buffers to rank 0's; recomputes other meta buffers. Raises ShardError if a module cannot."""
        own = [(name, buffer) for name, buffer in self.model.named_buffers() if name in values.tensors]
        replaced = dict[int, Tensor]()
        for name, buffer in own:
            value = values.broadcast_and_remove(name, self.device)
            if (buffer.device, buffer.dtype) == (value.device, value.dtype) and 0 not in buffer.stride():
                buffer.detach().copy_(value)  # in place: attributes and other buffers may be views of it
            else:
                replaced[id(buffer)] = value.clone()
        replace_by_id(self.model, replaced)
        for module in self.model.modules():
            self._reset_meta_buffers(module)

    def _reset_meta_buffers(self, module: nn.Module) -> None:
        """Makes a module's meta buffers real by its own method. Raises ShardError if that sets no values."""
        meta = {key: b for key, b in module.named_buffers(recurse=False) if b.is_meta}
        if not meta:
            return
        again = getattr(module, "reset_buffers", None) or getattr(module, "reset_running_stats", None)
        for key, buffer in meta.items():
            empty = torch.empty_like(buffer, device=self.device)
            tensors.registered_buffers(module)[key] = _fill_nan(empty)
        if again is not None:
            with torch.no_grad():
                again()
        for key, buffer in module.named_buffers(recurse=False):
            if key in meta and (again is None or _has_nan(buffer)):
                fix = "build the model within fullshard.parameters_on_meta(), which keeps buffers real"
                raise self._lost_buffer_error(module, key, fix=fix)

    def _check_parametrizations_have_buffers(self, module: nn.Module) -> None:
        if parametrize.is_parametrized(module):
            for inner in cast(nn.ModuleDict, module.parametrizations).modules():
                for key, buffer in inner.named_buffers(recurse=False):
                    if buffer.is_meta:
                        # They were computed from the tensor, which `parameters_on_meta` makes a meta tensor.
                        fix = "build the model on the CPU: rank 0's values are sharded then"
                        raise self._lost_buffer_error(inner, key, fix=fix)

    def _lost_buffer_error(self, module: nn.Module, key: str, *, fix: str) -> ShardError:
        if hasattr(self.model, "_constructor_tape"):  # built by this package: torch.empty is meta
            fix = 'with torch.device("cpu"): around the lines of the constructor that make and fill it'
        return ShardError(
            f"{self.names[module]}{'.' if self.names[module] else ''}{key} is a buffer on the meta device.",
            got=f"{_class_name_before_sharding(module)}, which has no reset_buffers() that sets it",
            why="a buffer's values are computed by the constructor, and the meta device lost them",
            fix=fix,
        )


class _SeedEachRandomOperation(TorchDispatchMode):
    """Dispatch mode that seeds each random operation. See [Note: the same values at any rank count]."""

    def __init__(self, seed: int, name: str, *, device: torch.device) -> None:
        super().__init__()
        self.seed, self.name, self.operations = seed, name, 0
        # torch.manual_seed is slow: it formats a stack for each kind of device that is absent.
        self.seed_all = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seed_all(_derive_seed(self.seed, f"{self.name}/{self.operations}"))
            self.operations += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _write_through_parametrizations(
    modules: Iterable[nn.Module], *, written: set[nn.Module]
) -> Generator[None]:
    """Makes writes into parametrized tensors (weight norm) of `written` set the parameters behind them.

    An initialiser writes into `module.weight`. It is computed from other parameters each time it is read, so
    the values would be lost.

    modules: all modules whose tensors initialisers may read
    """
    lists: dict[tuple[nn.Module, str], parametrize.ParametrizationList] = {
        (module, key): cast(Any, parametrizations)
        for module in modules
        if parametrize.is_parametrized(module)
        for key, parametrizations in cast(nn.ModuleDict, module.parametrizations).items()
    }
    with parametrize.cached() if lists else nullcontext():
        computed = {place: _parametrized_tensor_with_unchanged_buffers(one) for place, one in lists.items()}
        tensors.parametrization_cache().update(
            {(id(module), key): value for (module, key), value in computed.items()}
        )
        yield
        for (module, key), value in computed.items():
            if module in written:
                lists[module, key].right_inverse(value)


def _parametrized_tensor_with_unchanged_buffers(parametrizations: parametrize.ParametrizationList) -> Tensor:
    """Returns the tensor, on meta if its parameters are. Spectral norm would change its buffers."""
    is_meta = any(parameter.is_meta for parameter in parametrizations.parameters())
    buffers = [
        (tensors.registered_buffers(module), key, buffer)
        for module in parametrizations.modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]
    for slots, key, buffer in buffers:
        slots[key] = buffer.to("meta") if is_meta else buffer.clone()
    try:
        return parametrizations.forward()  # a call would run the hooks of FSDP2
    finally:
        for slots, key, buffer in buffers:
            slots[key] = buffer


@contextmanager
def _preserve_random_states(device: torch.device) -> Generator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _cut_shard_like_parameter(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns this rank's part of `whole`, with the placements and dtype of `parameter`. Not collective."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.dtype, copy=True)
    start, shape = own_box(whole.shape, parameter.device_mesh, placements=parameter.placements)
    local = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
    # A copy: a view would keep the whole tensor's storage alive.
    return dtensor_from_local_part(parameter, local.to(parameter.dtype, copy=True))


def local_device(plan: Plan) -> torch.device:
    """Returns the device on which this rank of the plan computes."""
    return torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _fill_nan(tensor: Tensor) -> Tensor:
    """Fills a tensor with NaN, which marks it as not initialised, and returns it. Integers stay unchanged."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _nan_parameter(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    dtype = torch.float32 if like.requires_grad else like.dtype
    return nn.Parameter(_fill_nan(torch.empty(like.shape, dtype=dtype, device=device)), requires_grad=False)


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any())


def _with_ancestors(modules: set[nn.Module], parents: Mapping[nn.Module, set[nn.Module]]) -> set[nn.Module]:
    found, left = set(modules), list(modules)
    while left:
        new = parents.get(left.pop(), set[nn.Module]()) - found
        found |= new
        left += new
    return found


def _class_name_before_sharding(module: nn.Module) -> str:
    """Returns the name of the module's class, without the prefix `FSDP` that FSDP2 adds."""
    return type(module).__name__.removeprefix("FSDP")


def _derive_seed(seed: int, name: str) -> int:
    """Returns a seed for the module or operation `name`: 63 bits of a hash of the run's seed and the name."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
