"""Sizes of one unit's tensors on one rank, from its shapes and the plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fullshard.errors import PlanError
from fullshard.planner.predict.compression import Wires, gather_wires, reduce_wires
from fullshard.spec.groups import ROUNDING_CHUNK_ELEMENTS, page_aligned_bytes
from fullshard.spec.model import ParamSpec, UnitSpec
from fullshard.spec.plan import ITEMSIZE, MergedUnitSettings, Plan
from fullshard.spec.settings.model_section import expert_shard_dim


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on one rank's device.

    N is the shard degree. Own shards: this rank's. Padded: dim 0 is rounded up to a multiple of N. With
    tensor parallelism, parameters are the first rank's part. Shards may be offloaded: see [Note: tiers] in
    `planner.predict.offload`.
    """

    shard_degree: int  # N
    replicate_degree: int  # number of replicas
    rank_distance: int  # between the ranks of a shard group; 1 if they are consecutive
    reshards: bool  # parameters are resharded after forward
    gathers_in_backward: bool  # parameters that were resharded are gathered again for backward
    shards: int  # own shards on the device, in the master dtype unless offloaded, padded
    frozen_shards: int  # the part of `shards` that is frozen
    own_shards: int  # trained own shards in the compute dtype, wherever they are stored
    on_drive: int  # `own_shards` in a file, where each shard starts at a page boundary
    frozen: int  # frozen own shards in their own dtype, wherever they are stored
    frozen_on_drive: int  # `frozen` in a file
    gathered: int  # all parameters as they are sent, padded: the all-gather buffer
    unpacking: int  # allocated beside `gathered` to copy out parameters sharded in another dim than 0
    cast_copy: int  # own shards cast for the all-gather; 0 if no cast is needed
    in_fp8: int  # elements of own shards that are gathered in fp8, padded
    largest_cast: int  # `cast_copy` of the largest parameter; over one rank, parameters are cast one by one
    whole: int  # gradients as autograd leaves them, unsharded
    whole_reduced: int  # `whole` in the reduce dtype
    largest_whole: int  # `whole` of the largest parameter
    largest_whole_reduced: int  # `whole_reduced` of the largest parameter
    reduce_input: int  # `whole_reduced`, padded: the reduce-scatter's input
    reduce_copies: int  # copies that the CPU makes for a moment to copy gradients into `reduce_input`
    reduce_copies_of_kept: int  # the same for gradients that were kept unsharded in the reduce dtype
    reduce_output: int  # the reduce-scatter's output, 1/N of its input
    gradient: int  # gradients of the own shards in the master dtype (as reduced if they are offloaded)
    trained: int  # elements of the own shards that the optimizer updates, without padding
    trained_parameters: int  # number of trained parameters
    largest_trained: int  # elements of the largest trained own shard
    in_eight_bits: int  # bytes of one moment as torchao stores it in 8 bits
    master_itemsize: int  # bytes per element of the master dtype
    gather_wires: Wires | None = None  # of gathers that [communication] compresses
    reduce_wires: Wires | None = None  # of reductions that it compresses


def padded_numel(shape: tuple[int, ...], shard_degree: int) -> int:
    """Returns ceil(shape[0] / N) * N * prod(shape[1:]): elements of a sharded parameter on N ranks."""
    return -(-shape[0] // shard_degree) * shard_degree * prod(shape[1:])


def unpadded_shard_numel(shape: tuple[int, ...], shard_degree: int, *, rank: int) -> int:
    """Returns the elements of `rank`'s shard: ceil(shape[0] / N) rows; last ranks have fewer or none."""
    rows = -(-shape[0] // shard_degree)
    return min(rows, max(0, shape[0] - rank * rows)) * prod(shape[1:])


def unit_bytes(unit: UnitSpec, plan: Plan, *, rank: int = 0) -> UnitBytes:
    """Returns the sizes of the tensors of `unit` on `rank`."""
    unit, settings, inner = _local_unit(unit, plan)
    degree, near, section = settings.shard_degree, settings.near_degree, plan.run.communication
    reduced, master = ITEMSIZE[settings.precision.reduce], ITEMSIZE[settings.precision.master]

    def padded_shard_numel(parameter: ParamSpec) -> int:
        return padded_numel(parameter.shape, degree) // degree

    shards, frozen_shards, casts, uncast = _shard_and_cast_bytes(unit, plan, settings=settings)
    trained = [p for p in unit.parameters if p.requires_grad]
    frozen = [p for p in unit.parameters if not p.requires_grad]
    chunk = sum(padded_shard_numel(p) for p in trained)
    copies, copies_of_kept = _cpu_reduce_copy_bytes(trained, settings) if plan.device == "cpu" else (0, 0)
    own = [unpadded_shard_numel(p.shape, degree, rank=rank % degree) for p in trained]
    elements = sum(padded_shard_numel(p) for p in unit.parameters)
    gathered = degree * sum(
        padded_shard_numel(p) * (1 if p.is_gathered_in_fp8 else _itemsize_in_computation(p, settings))
        for p in unit.parameters
    )
    return UnitBytes(
        shard_degree=degree,
        replicate_degree=settings.replicate_degree,
        rank_distance=settings.rank_distance,
        reshards=settings.reshard_after_forward,
        gathers_in_backward=settings.gathers_in_backward,
        shards=shards,
        frozen_shards=frozen_shards,
        own_shards=sum(padded_shard_numel(p) * _itemsize_in_computation(p, settings) for p in trained),
        on_drive=sum(
            page_aligned_bytes(padded_shard_numel(p), _itemsize_in_computation(p, settings)) for p in trained
        ),
        frozen=sum(padded_shard_numel(p) * p.itemsize for p in frozen),
        frozen_on_drive=sum(page_aligned_bytes(padded_shard_numel(p), p.itemsize) for p in frozen),
        gathered=gathered,
        unpacking=sum(p.numel * _itemsize_in_computation(p, settings) for p in inner),
        cast_copy=sum(casts) + uncast,
        in_fp8=sum(padded_shard_numel(p) for p in unit.parameters if p.is_gathered_in_fp8),
        largest_cast=max(casts, default=0) + uncast,
        whole=sum(p.numel * _itemsize_in_computation(p, settings) for p in trained),
        whole_reduced=sum(p.numel for p in trained) * reduced,
        largest_whole=max((p.numel * _itemsize_in_computation(p, settings) for p in trained), default=0),
        largest_whole_reduced=max((p.numel for p in trained), default=0) * reduced,
        reduce_input=degree * chunk * reduced,
        reduce_copies=copies,
        reduce_copies_of_kept=copies_of_kept,
        reduce_output=chunk * reduced,
        gradient=chunk * (reduced if plan.copies_gradients_to_host else master),
        trained=sum(own),
        trained_parameters=len(trained),
        largest_trained=max(own, default=0),
        in_eight_bits=sum(_eight_bit_moment_bytes(numel, master) for numel in own),
        master_itemsize=master,
        gather_wires=gather_wires(section, elements, ranks=degree, dtype=settings.precision.param)
        if degree > 1 and all(p.is_floating and not p.is_gathered_in_fp8 for p in unit.parameters)
        else None,
        reduce_wires=reduce_wires(section, chunk, ranks=degree, near=near, dtype=settings.precision.reduce)
        if degree > 1 and chunk
        else None,
    )


def _local_unit(unit: UnitSpec, plan: Plan) -> tuple[UnitSpec, MergedUnitSettings, list[ParamSpec]]:
    """Returns (unit, settings, inner) of the part of `unit` that FSDP2 shards for a rank.

    unit: with the shapes of the first rank's part, if ranks share matmuls or divide experts, and with the dim
        first that FSDP2 shards.
    inner: the parameters that FSDP2 shards in another dim than 0.
    """
    settings = MergedUnitSettings.for_unit(
        plan, unit.override, kept=unit.kept, is_embedding=unit.is_embedding, has_experts=unit.has_experts
    )
    if unit.has_experts and plan.has_expert_mesh:
        ranks = plan.expert_parallel
        unit = _unit_with_shapes(unit, lambda p: (p.shape[0] // ranks, *p.shape[1:]))
    elif plan.tensor_parallel > 1:
        unit = _unit_with_shapes(unit, lambda p: p.tensor_parallel_shape(plan.tensor_parallel))
    if not settings.shards_any_dim:
        return unit, settings, []
    degree = settings.shard_degree
    inner = [p for p in unit.parameters if _expert_shard_dim(p, degree)]
    unit = _unit_with_shapes(unit, lambda p: _move_sharded_dim_first(p, degree))
    return unit, settings, inner


def _itemsize_in_computation(parameter: ParamSpec, settings: MergedUnitSettings) -> int:
    return ITEMSIZE[settings.precision.param] if parameter.is_floating else parameter.itemsize


def _cpu_reduce_copy_bytes(trained: Sequence[ParamSpec], settings: MergedUnitSettings) -> tuple[int, int]:
    """Returns the bytes that the CPU's _chunk_cat copies, for fresh gradients and for those kept unsharded.

    It pads gradients one after the other, and then copies each one that it casts.
    """
    degree = settings.shard_degree
    compute, reduced = ITEMSIZE[settings.precision.param], ITEMSIZE[settings.precision.reduce]
    largest = max((padded_numel(p.shape, degree) for p in trained), default=0)
    uneven = sum(padded_numel(p.shape, degree) for p in trained if p.shape[0] % degree)
    return (uneven + (largest if compute != reduced else 0)) * compute, uneven * reduced


def _shard_and_cast_bytes(
    unit: UnitSpec, plan: Plan, *, settings: MergedUnitSettings
) -> tuple[int, int, list[int], int]:
    """Returns bytes on the device as (shards, frozen, casts, uncast).

    shards: bytes of the own shards.
    frozen: bytes of those that are not trained.
    casts: bytes of each shard that is cast or copied in for an all-gather.
    uncast: bytes of the largest shard that is copied in and then cast.
    """
    tier, on_cpu, degree = plan.run.offload, plan.device == "cpu", settings.shard_degree
    master = ITEMSIZE[settings.precision.master]
    # On the CPU, host memory is device memory: masters are the shards, unless they are on the drive.
    is_master = not tier.offloads_optimizer or (on_cpu and not tier.is_on_drive)
    shards, frozen, casts, uncast = 0, 0, list[int](), 0
    for parameter in unit.parameters:
        elements = padded_numel(parameter.shape, degree) // degree
        is_trained = parameter.requires_grad and parameter.is_floating
        used = _itemsize_in_computation(parameter, settings)
        kept = parameter.itemsize if not is_trained else master if is_master else used
        if parameter.is_gathered_in_fp8:
            used = 1
            # Over one rank, shards are cast while the unit's parameters are there; scaled in fp32 first.
            uncast = max(uncast, elements * kept if degree == 1 else 0)
        of_tier = tier.offloads_optimizer if is_trained else tier.offloads_parameters and not is_master
        is_elsewhere = of_tier and (tier.offloads_parameters or is_master)
        shards += 0 if is_elsewhere else elements * kept
        frozen += 0 if is_elsewhere or is_trained else elements * kept
        # A shard copied in from the host occupies device memory like a shard that is cast.
        if used != kept or (is_elsewhere and not on_cpu):
            casts.append(elements * used)
            if used != kept and is_elsewhere and not on_cpu:
                uncast = max(uncast, elements * kept)
    return shards, frozen, casts, uncast


def _eight_bit_moment_bytes(numel: int, itemsize: int) -> int:
    """Returns the bytes of a moment in 8 bits: codes, a 4-byte scale per 256 values, and a 1 KiB table.

    Shards below 4096 elements, and those not divisible by 256, keep the master dtype. torchao.optim, 0.18.
    """
    if numel < 4096 or numel % 256:
        return numel * itemsize
    return numel + 4 * (numel // 256) + 4 * 256


def _unit_with_shapes(unit: UnitSpec, shape_of: Callable[[ParamSpec], tuple[int, ...]]) -> UnitSpec:
    parts = tuple(p.model_copy(update={"shape": shape_of(p)}) for p in unit.parameters)
    return unit.model_copy(update={"parameters": parts})


def _expert_shard_dim(experts: ParamSpec, degree: int) -> int:
    return expert_shard_dim(experts.shape, degree, keeps_rows=experts.packed_columns is not None)


def _move_sharded_dim_first(experts: ParamSpec, degree: int) -> tuple[int, ...]:
    """Returns the shape of stacked experts, with the dim first in which `degree` ranks shard them."""
    shape, dim = experts.shape, _expert_shard_dim(experts, degree)
    return (shape[dim], *shape[:dim], *shape[dim + 1 :])


def optimizer_state_bytes(size: UnitBytes, plan: Plan) -> int:
    """Returns the bytes of optimizer state on the device for a rank's own shards of a unit.

    - AdamW: 2 · numel in the master dtype, and a 4-byte step count per parameter. Muon, SOAP and Adafactor:
      the same; `state_bytes_below_adamw` has the difference.
    - AdamW in 8 bits: about 2 bytes per element, and the step counts.
    - SGD: 1 · numel with momentum, 0 without.
    - Offloaded: 0, except the step counts on the CPU, where they always are.

    Raises PlanError for an optimizer whose state is not known.
    """
    section = plan.run.optimizer
    if plan.run.offload.offloads_optimizer:
        return 4 * size.trained_parameters if plan.device == "cpu" else 0
    name = section.name.lower()
    if name in ("adamw", "muon", "soap", "adafactor"):
        return 2 * size.trained * size.master_itemsize + 4 * size.trained_parameters
    if name == "adamw8bit":
        return 2 * size.in_eight_bits + 4 * size.trained_parameters
    if name == "sgd":
        return size.trained * size.master_itemsize if section.options.get("momentum") else 0
    raise PlanError(
        "the size of this optimizer's state is not known.",
        got=f"optimizer.name = {section.name!r}",
        fix="adamw, muon, soap, adafactor, adamw8bit or sgd, for a prediction",
    )


def parameter_average_bytes(size: UnitBytes, plan: Plan) -> int:
    """Returns the bytes of the averages of a rank's own shards of a unit: fp32, whatever the master dtype.

    Those of an offload target are in host memory, beside the masters.
    """
    return 4 * size.trained if plan.run.ema.decay and not plan.run.offload.offloads_optimizer else 0


def stochastic_rounding_temporary_bytes(elements: int, plan: Plan) -> int:
    """Returns the bytes of temporaries of an update of `elements` with stochastic rounding.

    A GPU updates them in one kernel. The CPU takes a chunk at a time, with fp32 copies of value, gradient and
    moments (20 bytes per element), and the random numbers and their words (48).
    """
    return 0 if plan.device == "cuda" else 68 * min(elements, ROUNDING_CHUNK_ELEMENTS)


def update_temporary_bytes(sizes: Iterable[UnitBytes], plan: Plan) -> int:
    """Returns the bytes of temporaries of an update of the units of `sizes`. Fused AdamW has none,
    and those of an offloaded update are in `device_update_buffer_bytes`.

    Weight decay of SGD copies gradients: one parameter's on the CPU, all on GPUs. Others update parameter by
    parameter: stochastic rounding as `stochastic_rounding_temporary_bytes` says; AdamW in 8 bits with 53
    bytes per element on the CPU, where it is eager. On a GPU it is compiled, to a kernel that writes at most
    both new moments in fp32 and their scales before it quantises them (measured with Inductor on a CPU).
    """
    section, units = plan.run.optimizer, list(sizes)
    if plan.run.offload.offloads_optimizer:
        return 0
    largest = max((size.largest_trained for size in units), default=0)
    if plan.precision.stochastic_rounding:
        return stochastic_rounding_temporary_bytes(largest, plan)
    if section.name.lower() == "adamw8bit":
        return 53 * largest if plan.device == "cpu" else 8 * largest + 8 * largest // 256
    if section.name.lower() == "sgd" and section.weight_decay:
        elements = sum(size.trained for size in units) if plan.device == "cuda" else largest
        return elements * max((size.master_itemsize for size in units), default=0)
    return 0
