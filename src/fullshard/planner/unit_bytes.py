"""The sizes of one unit's tensors, from its shapes and the plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fullshard.errors import PlanError
from fullshard.planner.tensor_parallel import split_shape
from fullshard.spec.groups import part_bytes
from fullshard.spec.model import ParamSpec, UnitSpec
from fullshard.spec.plan import ITEMSIZE, Plan
from fullshard.spec.unit import UnitSettings


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on one rank's device. N: shard degree; padded: dim 0 to a multiple of N; of matrices
    that the ranks of a tensor-parallel axis share, this rank's part.

    shards          own shards in the master dtype, padded; with a tier: [Note: tiers] in `planner.offload`
    own_shards      those that are trained, in the dtype computed in, be they kept here or not
    on_drive        the same in a file, where each begins at a page
    frozen          the others, in their own dtype, be they kept here or not; `frozen_on_drive`: in a file
    gathered        all parameters in the dtype computed in, padded: the all-gather buffer, and again its copy
    cast_copy       own shards cast for the all-gather; 0 where no cast is needed
    kept_copy       the same, of what is kept over fewer ranks after forward, for each own shard of it
    largest_cast    the same for the largest parameter alone: over one rank they are cast one by one
    whole           gradients as autograd leaves them; `last_whole`: of the last parameter
    whole_reduced   the same in the dtype that they are reduced in
    reduce_input    the same, padded: the reduce-scatter's input
    reduce_output   its output, 1/N of it
    gradient        the output in the master dtype: the gradients of the own shards (with a tier: as reduced)
    trained         elements of the own shards that the optimizer updates, without padding; `in_eight_bits`:
                    bytes of one moment of them that torchao keeps in 8
    """

    shard_degree: int
    replicate_degree: int
    reshards: bool
    reshard_degree: int
    shards: int
    own_shards: int
    on_drive: int
    frozen: int
    frozen_on_drive: int
    gathered: int
    cast_copy: int
    kept_copy: int
    largest_cast: int
    whole: int
    whole_reduced: int
    largest_whole: int
    last_whole: int
    largest_whole_reduced: int
    reduce_input: int
    reduce_output: int
    gradient: int
    trained: int
    trained_parameters: int
    largest_trained: int
    in_eight_bits: int
    master_itemsize: int


def padded_numel(shape: tuple[int, ...], shard_degree: int) -> int:
    """ceil(shape[0] / N) * N * prod(shape[1:]): what N ranks hold of a parameter sharded on dim 0."""
    return -(-shape[0] // shard_degree) * shard_degree * prod(shape[1:])


def shard_numel(shape: tuple[int, ...], shard_degree: int, *, rank: int) -> int:
    """Elements of the own shard: chunks of ceil(shape[0] / N) rows, the last ones smaller, or empty."""
    rows = -(-shape[0] // shard_degree)
    return min(rows, max(0, shape[0] - rank * rows)) * prod(shape[1:])


def unit_bytes(unit: UnitSpec, plan: Plan, *, rank: int = 0) -> UnitBytes:
    """The sizes of `unit` on `rank`."""
    settings = UnitSettings.of(plan, unit.override, kept=unit.kept)
    degree, reshard = settings.shard_degree, settings.reshard_after_forward
    precision = settings.precision
    compute, reduced, master = (ITEMSIZE[d] for d in (precision.param, precision.reduce, precision.master))
    if plan.tensor_parallel > 1:
        unit = split_unit(unit, plan.tensor_parallel)

    def padded(parameter: ParamSpec) -> int:
        return padded_numel(parameter.shape, degree)

    def used_in(parameter: ParamSpec) -> int:
        return compute if parameter.is_floating else parameter.itemsize

    shards, casts, again, uncast = _shards_and_casts(unit, plan, settings=settings)
    trained = [p for p in unit.parameters if p.requires_grad]
    frozen = [p for p in unit.parameters if not p.requires_grad]
    wire = sum(padded(p) for p in trained)
    own = [shard_numel(p.shape, degree, rank=rank % degree) for p in trained]
    return UnitBytes(
        shard_degree=degree,
        replicate_degree=settings.replicate_degree,
        reshards=reshard is not False,
        reshard_degree=1 if isinstance(reshard, bool) else reshard,
        shards=shards,
        own_shards=sum(padded(p) // degree * used_in(p) for p in trained),
        on_drive=sum(part_bytes(padded(p) // degree, used_in(p)) for p in trained),
        frozen=sum(padded(p) // degree * p.itemsize for p in frozen),
        frozen_on_drive=sum(part_bytes(padded(p) // degree, p.itemsize) for p in frozen),
        gathered=sum(padded(p) * used_in(p) for p in unit.parameters),
        cast_copy=sum(casts) + uncast,
        kept_copy=sum(again),
        largest_cast=max(casts, default=0) + uncast,
        whole=sum(p.numel * used_in(p) for p in trained),
        whole_reduced=sum(p.numel for p in trained) * reduced,
        largest_whole=max((p.numel * used_in(p) for p in trained), default=0),
        last_whole=sum(p.numel * used_in(p) for p in trained[-1:]),
        largest_whole_reduced=max((p.numel for p in trained), default=0) * reduced,
        reduce_input=wire * reduced,
        reduce_output=wire // degree * reduced,
        gradient=wire // degree * (reduced if plan.gradients_leave else master),
        trained=sum(own),
        trained_parameters=len(trained),
        largest_trained=max(own, default=0),
        in_eight_bits=sum(_eight_bits(numel, master) for numel in own),
        master_itemsize=master,
    )


def _shards_and_casts(
    unit: UnitSpec, plan: Plan, *, settings: UnitSettings
) -> tuple[int, list[int], list[int], int]:
    """Bytes of the own shards on the device, of each shard that is cast or copied for an all-gather, of
    those of them that are so again where the gather is of what is kept after forward, and of the largest that
    is copied in and cast then."""
    tier, on_cpu, degree = plan.run.offload, plan.device == "cpu", settings.shard_degree
    compute, master = ITEMSIZE[settings.precision.param], ITEMSIZE[settings.precision.master]
    # On the CPU a tier's host is the device: its masters are the shards, and copies only where these are not.
    is_master = not tier.takes_optimizer or (on_cpu and not tier.on_disk)
    shards, casts, again, uncast = 0, list[int](), list[int](), 0
    for parameter in unit.parameters:
        elements = padded_numel(parameter.shape, degree) // degree
        is_trained = parameter.requires_grad and parameter.is_floating
        kept = parameter.itemsize if not is_trained else master if is_master else compute
        used = compute if parameter.is_floating else parameter.itemsize
        of_tier = tier.takes_optimizer if is_trained else tier.takes_parameters and not is_master
        is_elsewhere = of_tier and (tier.takes_parameters or is_master)
        shards += 0 if is_elsewhere else elements * kept
        # One that is copied in from the host stands in the device's memory as one that is cast does.
        if used != kept or (is_elsewhere and not on_cpu):
            casts.append(elements * used)
            # What of a tier's is kept the engine sends as it is; the rest it copies before that.
            again += [] if of_tier else [elements * used]
            if used != kept and is_elsewhere and not on_cpu:
                uncast = max(uncast, elements * kept)
    return shards, casts, again, uncast


def _eight_bits(numel: int, itemsize: int) -> int:
    """Bytes of a moment: codes of 1 byte, a scale of 4 for each block of 256, and the 256 values that codes
    stand for; in the master dtype where a shard is small or no multiple of a block. torchao.optim, 0.18."""
    if numel < 4096 or numel % 256:
        return numel * itemsize
    return numel + 4 * (numel // 256) + 4 * 256


def split_unit(unit: UnitSpec, degree: int) -> UnitSpec:
    """The unit as one rank of a tensor-parallel axis has it."""
    parts = tuple(p.model_copy(update={"shape": split_shape(p.shape, degree)}) for p in unit.parameters)
    return unit.model_copy(update={"parameters": parts})


def optimizer_bytes(size: UnitBytes, plan: Plan) -> int:
    """What the optimizer keeps for the own shards of a unit, in the master dtype: 2 · numel for AdamW (and a
    step count of 4 bytes a parameter), 1 · numel for SGD with momentum, 0 for SGD without; about 2 bytes an
    element for AdamW in 8 bits.

    Nothing on the device where a tier has it, but the step counts on the CPU, where they always are.
    Raises PlanError for an optimizer whose state is not known.
    """
    section = plan.run.optimizer
    if plan.run.offload.takes_optimizer:
        return 4 * size.trained_parameters if plan.device == "cpu" else 0
    name = section.name.lower()
    if name == "adamw":
        return 2 * size.trained * size.master_itemsize + 4 * size.trained_parameters
    if name == "adamw8bit":
        return 2 * size.in_eight_bits + 4 * size.trained_parameters
    if name == "sgd":
        return size.trained * size.master_itemsize if section.momentum else 0
    raise PlanError(
        "the size of this optimizer's state is not known.",
        got=f"optimizer.name = {section.name!r}",
        fix="adamw, adamw8bit or sgd, for a prediction",
    )


def update_temporaries(sizes: Iterable[UnitBytes], plan: Plan) -> int:
    """What the update needs beside what lasts, over the units of `sizes`. Fused AdamW works in place.

    SGD adds the decay to a copy of the gradients: of one parameter at a time on the CPU, of all on GPUs.
    Stochastic rounding, parameter by parameter: fp32 copies of value, gradient and both moments, and the
    denominator (20 bytes an element), random bits (4), and masks (7).
    AdamW in 8 bits, parameter by parameter: 53 bytes an element on the CPU, where it is not compiled; what is
    compiled needs less, how much is not measured.
    """
    section, units = plan.run.optimizer, list(sizes)
    if plan.run.offload.takes_optimizer:
        return 0
    largest = max((size.largest_trained for size in units), default=0)
    if plan.precision.stochastic_rounding:
        return 31 * largest
    if section.name.lower() == "adamw8bit":
        return 53 * largest
    if section.name.lower() == "sgd" and section.weight_decay:
        elements = sum(size.trained for size in units) if plan.device == "cuda" else largest
        return elements * max((size.master_itemsize for size in units), default=0)
    return 0
