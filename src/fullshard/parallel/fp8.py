"""fp8 matmuls of linear modules, by torchao's `float8`, on plain weights.

[Note: weights stay plain]
torchao replaces linear modules, and wraps weights in a tensor subclass, which would then be in the shards,
the optimizer and the checkpoints. Here modules stay, and only their `forward` is replaced. Shards stay plain
masters. With one scale per tensor, a shard's local tensor gets FSDP2's extension points
`fsdp_pre_all_gather` and `fsdp_post_all_gather` as attributes: the first casts the master to fp8, the second
makes torchao's fp8 tensor of what was gathered. Its bytes are sent as uint8, which all backends can send.

[Note: one reduction of scales]
A weight's scale depends on its largest absolute value on all ranks. When the model's forward begins, one
all-reduce finds it for all weights. In a `make_scale_reuse_context`, only the first forward does this,
because the weights do not change. The scales follow from the weights alone, so a checkpoint needs none.
With tensor parallelism, a second all-reduce gives all parts of a weight the scale of the whole. Inputs and
gradients that are divided over these ranks have scales of their own on each.
If a unit is gathered before any forward (FSDP2's `unshard()`, a method that `shard` was not given), its
all-gather finds no scale and begins with that all-reduce: all ranks of the mesh must then gather it.

[Note: which matrices]
Linear modules inside the repeated blocks, with `fp8_min_features` and a multiple of 16 of input and output
features, as fp8 matmuls need; with tensor parallelism, per rank. The others stay in bf16:

- embeddings and heads, whose errors harm the loss most;
- experts: the kernels need a multiple of 16 tokens, and routing gives any number;
- frozen matrices: torchao's backward computes the gradient of every weight, and so saves nothing.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.tensors import (
    find_linear_function,
    multiply_by_own_weight,
    set_linear_function,
)
from fullshard.errors import MissingExtraError, PlanError, ShardError
from fullshard.parallel.units import Unit
from fullshard.spec.model import Fp8MatrixGroup
from fullshard.spec.plan import DeviceType, Fp8Scaling, Plan
from fullshard.system.dotted import import_quietly
from fullshard.torch_private.fsdp import engine_parameters, flat_padded_shard, list_units
from fullshard.torch_private.tensors import foreach_norm, local_part

_MULTIPLE = 16  # of rows and columns, as fp8 matmuls need
_LEAST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs: Ada
_ATTRIBUTE = "_fullshard_fp8"  # attribute of the model


class UncompiledFp8Warning(UserWarning):
    """Warning of fp8 matmuls on a GPU without `run.compile`, which are slower than bf16's."""


@dataclass(frozen=True)
class Fp8Choice:
    """The linear modules of a model that are multiplied in fp8, by name, and a summary of all matrices."""

    scaling: Fp8Scaling
    linears: dict[str, nn.Linear]
    shares: tuple[Fp8MatrixGroup, ...]


@dataclass(frozen=True)
class _Fp8Matmul:
    """torchao's matmul of a linear module, with its configuration.

    function: an autograd function
    configs: for inputs whose number of rows is a multiple of 16, and for others, which are padded
    make_weight: `make_weight(data, scale, dtype=...)`, returns torchao's tensor of fp8 data
    """

    function: Any
    recipe: Any
    configs: tuple[Any, Any]
    make_weight: Callable[..., Tensor]


# Choice #
def choose_fp8_linears(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    plan: Plan,
    blocks: Sequence[nn.Module],
    divided: Mapping[str, int | None],
) -> Fp8Choice | None:
    """Returns the linear modules that `plan` multiplies in fp8; None if its precision is without fp8.

    blocks: the repeated blocks of the model
    divided: parameter name -> the dim that tensor parallelism divides; None, as a missing one: no dim

    Raises MissingExtraError without torchao, ShardError if no module can be multiplied in fp8.
    """
    if plan.precision.fp8 is None:
        return None
    import_float8()
    holders: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders[id(parameter)].append((module, key))
    names = {module: name for name, module in model.named_modules()}
    inside = {module for block in blocks for module in block.modules()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears, counted = dict[str, nn.Linear](), defaultdict[str, list[int]](list)
    for unit in units:
        for name, parameter in unit.parameters.items():
            if parameter.ndim < 2:
                continue
            modules = holders[id(parameter)]
            outside = any(module not in inside or module is head for module, _ in modules)
            sizes = list[float](parameter.shape)
            # Of a weight that each rank has whole, a rank may use its part of the rows.
            sizes[divided.get(name) or 0] /= plan.tensor_parallel
            reason = _reason_for_bf16(name, sizes, modules=modules, unit=unit, plan=plan, outside=outside)
            counted[reason].append(parameter.numel())
            if not reason:
                linears |= {names[module]: cast(nn.Linear, module) for module, _ in modules}
    shares = [Fp8MatrixGroup(reason=why, matrices=len(own), numel=sum(own)) for why, own in counted.items()]
    shares.sort(key=lambda share: (bool(share.reason), -share.numel))
    if not linears:
        raise _no_matrix_error(model, shares)
    return Fp8Choice(plan.precision.fp8.scaling, linears, tuple(shares))


def _reason_for_bf16(
    name: str,
    sizes: Sequence[float],
    *,
    modules: Sequence[tuple[nn.Module, str]],
    unit: Unit,
    plan: Plan,
    outside: bool,
) -> str:
    """Returns why a matrix stays in bf16; empty if it is multiplied in fp8. See [Note: which matrices].

    sizes: output and input features that a rank multiplies
    """
    own = unit.settings(plan).precision
    if own.fp8 is None:
        return f"in units in {own.param}"
    conditions = (
        (outside, "outside of the blocks"),
        (any(type(one) is not nn.Linear or key != "weight" for one, key in modules), "of other modules"),
        ("experts" in name.split("."), "of experts"),
        (not unit.parameters[name].requires_grad, "frozen"),
        (any(size % _MULTIPLE for size in sizes), f"with features that {_MULTIPLE} does not divide"),
        (min(sizes) < own.fp8.min_features, f"with under {own.fp8.min_features:,} features"),
    )
    reason = next((why for holds, why in conditions if holds), "")
    return f"{reason} per rank" if "features" in reason and plan.tensor_parallel > 1 else reason


def _no_matrix_error(model: nn.Module, shares: Sequence[Fp8MatrixGroup]) -> ShardError:
    has_small = any("under" in share.reason for share in shares)
    smaller = "a smaller precision.fp8_min_features, though small matrices are faster in bf16"
    return ShardError(
        f"{type(model).__name__} has no matrix to multiply in fp8.",
        got=", ".join(f"{share.matrices} {share.reason}" for share in shares) or "no matrix at all",
        why="fp8 is for linear modules of the repeated blocks that are trained",
        fix=smaller if has_small else 'precision.mode = "bf16"',
    )


def check_fp8_device(plan: Plan) -> None:
    """Raises PlanError if this rank's GPU has no fp8 matmuls. Warns on rank 0 if they are not compiled."""
    if plan.precision.fp8 is None or plan.device != "cuda":
        return
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _LEAST_CAPABILITY:
        raise PlanError(
            f"{torch.cuda.get_device_name()} has no fp8 matmuls.",
            got=f"compute capability {capability[0]}.{capability[1]}, {plan.run.precision.mode}",
            why=f"they begin with {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} (Ada, Hopper)",
            fix='precision.mode = "bf16"',
        )
    if plan.run.run.compile is not True and dist.get_rank() == 0:
        warnings.warn(
            "fp8 without run.compile = true is slower than bf16: each cast is a pass over memory of its own",
            UncompiledFp8Warning,
            stacklevel=4,
        )


# Forward #
@cache
def import_float8() -> ModuleType:
    """Imports `torchao.float8`, with its fixes of torch applied. Raises MissingExtraError without torchao."""
    try:
        float8: Any = import_quietly("torchao.float8")
    except ImportError as error:
        raise MissingExtraError("fp8", package="torchao", needed_for='precision.mode = "fp8"') from error
    float8.convert_to_float8_training(nn.Module())  # it corrects the compiler's code for casts to fp8
    return float8


@cache
def _make_fp8_matmul(scaling: Fp8Scaling, *, emulated: bool) -> _Fp8Matmul:
    float8: Any = import_float8()
    recipe = replace(float8.Float8LinearConfig.from_recipe_name(scaling), emulate=emulated)
    matmuls = [
        float8.ScaledMMConfig(emulated, one.use_fast_accum, False, False)
        for one in (recipe.gemm_config_output, recipe.gemm_config_grad_input, recipe.gemm_config_grad_weight)
    ]
    # The inner dimension of the matmul for the weight's gradient is the number of rows.
    padded = (*matmuls[:2], matmuls[2]._replace(pad_inner_dim=True))
    configs = (float8.LinearMMConfig(*matmuls), float8.LinearMMConfig(*padded))
    function = import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    role = float8.GemmInputRole.WEIGHT

    def make_weight(data: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
        return float8.Float8TrainingTensor(data, scale, dtype, configs[0], gemm_input_role=role)

    return _Fp8Matmul(function, recipe, configs, make_weight)


def convert_linears_to_fp8(choice: Fp8Choice, *, device: DeviceType) -> None:
    """Replaces the `forward` of the chosen modules. On a CPU, matmuls in fp8 are emulated in fp32."""
    product = partial(_multiply_in_fp8, matmul=_make_fp8_matmul(choice.scaling, emulated=device == "cpu"))
    for module in choice.linears.values():
        # Tensor parallelism calls the function in a forward of its own.
        has_product = find_linear_function(module) is not None
        set_linear_function(module, product)
        if not has_product:
            module.forward = partial(multiply_by_own_weight, module)


def _multiply_in_fp8(x: Tensor, weight: Tensor, *, bias: Tensor | None, matmul: _Fp8Matmul) -> Tensor:
    config = matmul.configs[x.numel() // x.shape[-1] % _MULTIPLE != 0]
    output = matmul.function.apply(x, weight.t(), config, matmul.recipe)
    return output if bias is None else output + bias.to(output.dtype)


def fake_fp8_weight(shape: Sequence[int], *, device: DeviceType, dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight as it is after it was gathered in fp8, without values.

    device: the device for which it is multiplied
    dtype: the dtype of its gradient
    """
    data = torch.empty(tuple(shape), dtype=torch.uint8).view(torch.float8_e4m3fn)
    make_weight = _make_fp8_matmul("tensorwise", emulated=device == "cpu").make_weight
    return nn.Parameter(make_weight(data, torch.empty(()), dtype=dtype))


# All-gather #
class WeightScales:
    """Scales of the weights that one sharded model gathers in fp8: see [Note: one reduction of scales].

    shares: summary of all matrices of the model
    """

    def __init__(self, shares: tuple[Fp8MatrixGroup, ...]) -> None:
        self.shares = shares
        self._groups: dict[Any, list[Any]] = defaultdict(list)  # FSDP2's parameters by process groups
        self._scales: dict[int, Tensor] = {}
        self._reuses = False

    def set_up_parameter_gather(self, engine_parameter: Any, matmul: _Fp8Matmul) -> None:
        """Makes FSDP2 gather a parameter, which has values, in fp8. `engine_parameter`: FSDP2's object."""
        engine_parameter.reset_sharded_param()  # pads the shard, which now stays the same tensor
        sharded = engine_parameter.sharded_param
        axes = [axis for axis, placement in enumerate(sharded.placements) if not placement.is_replicate()]
        self._groups[tuple(map(sharded.device_mesh.get_group, axes))].append(engine_parameter)

        def pre_all_gather(
            mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
        ) -> tuple[tuple[Tensor], Tensor]:  # signature: FSDP2's
            if id(engine_parameter) not in self._scales:
                self.compute()
            scale = self._scales[id(engine_parameter)]
            shard = flat_padded_shard(engine_parameter).view(engine_parameter.padded_sharded_param_size)
            # The scale maps the largest value to that of fp8, up to rounding: nothing is to be clamped.
            data = (shard * scale).to(torch.float8_e4m3fn)
            return (data.view(torch.uint8),), scale

        def post_all_gather(  # signature: FSDP2's
            outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            if out is not None:
                out._scale = scale
                return None
            return matmul.make_weight(outputs[0].view(torch.float8_e4m3fn), scale, dtype=dtype), outputs

        local: Any = local_part(sharded)
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather

    @torch.no_grad()
    def compute(self) -> None:
        """Computes the scales of all weights. Collective."""
        for groups, parameters in self._groups.items():
            shards = [flat_padded_shard(one) for one in parameters]
            largest = torch.stack(list(foreach_norm(shards, float("inf"))))
            for group in groups:
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            scales = torch.finfo(torch.float8_e4m3fn).max / largest.double().clamp(min=1e-12)
            self._scales |= dict(zip(map(id, parameters), scales.float().unbind(), strict=True))

    def compute_unless_reused(self) -> None:
        """Computes the scales, except if they are reused and known."""
        if not (self._reuses and self._scales):
            self.compute()

    @contextmanager
    def reuse(self) -> Generator[None]:
        """Context in which the scales are computed once, when first needed. They are dropped at its end."""
        self._scales, self._reuses = {}, True
        try:
            yield
        finally:
            self._scales, self._reuses = {}, False


def set_up_fp8_gathers(
    model: nn.Module, choice: Fp8Choice, *, device: DeviceType, methods: Sequence[str]
) -> None:
    """Makes FSDP2 gather the chosen modules' weights in fp8, if they have one scale per tensor.

    model: the sharded model, whose shards have values
    methods: names of methods that compute with the parameters, besides `forward`
    """
    scales = WeightScales(choice.shares)
    setattr(model, _ATTRIBUTE, scales)
    if choice.scaling != "tensorwise":
        return
    matmul = _make_fp8_matmul(choice.scaling, emulated=device == "cpu")
    weights = {id(module.weight) for module in choice.linears.values()}
    for unit in list_units(model):
        for one in engine_parameters(unit):
            if id(one.sharded_param) in weights:
                scales.set_up_parameter_gather(one, matmul)
    # Before FSDP2's own hook, which gathers the root.
    model.register_forward_pre_hook(lambda *_: scales.compute_unless_reused(), prepend=True)
    for name in methods:
        setattr(model, name, _compute_scales_before(getattr(model, name), scales))


def _compute_scales_before(method: Callable[..., Any], scales: WeightScales) -> Callable[..., Any]:
    @wraps(method)
    def method_after_scales(*args: Any, **kwargs: Any) -> Any:  # signature: the model's own
        scales.compute_unless_reused()
        return method(*args, **kwargs)

    return method_after_scales


def find_weight_scales(model: nn.Module) -> WeightScales | None:
    """Returns the scales of a model that was sharded with fp8 matmuls; None for any other model."""
    return getattr(model, _ATTRIBUTE, None)


def make_scale_reuse_context(model: nn.Module) -> Any:
    """Returns a context in which the model's weights do not change, so that scales are computed once."""
    scales = find_weight_scales(model)
    return nullcontext() if scales is None else scales.reuse()
