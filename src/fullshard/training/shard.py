"""Shards a model, with the training state that its plan offloads: its optimizer, and its removal."""

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fullshard.distributed.agreement import all_gather_object, all_ranks_have, rank
from fullshard.errors import ForeignOffloadError, OffloadError, ShardError
from fullshard.offload import adamw, directories
from fullshard.offload.drive import SYSTEM, DriveCounters, DriveSystemCalls
from fullshard.offload.drive_store import DriveStore, check_generation_and_reset_store
from fullshard.offload.gather_source import DriveShards, master_dtype
from fullshard.offload.generations import Generation, GenerationFiles, discard_rank_directory
from fullshard.offload.rounding import AdamOptions
from fullshard.offload.state import OffloadedState, OffloadSettings, find_offloaded_state, set_offloaded_state
from fullshard.offload.store import GroupLayout as GroupRecord
from fullshard.parallel import apply, model_parameters
from fullshard.parallel.fp8 import set_up_fp8_gathers
from fullshard.parallel.materialize import Initialise, allocate_and_fill_shards, local_device
from fullshard.parallel.mesh import build_axis_group
from fullshard.parallel.model_parallel import divide_model_and_return_split_dims
from fullshard.parallel.unit_events import install_reshard_after_evaluation
from fullshard.parallel.units import Predicate
from fullshard.spec.groups import OffloadGroup
from fullshard.spec.plan import Plan
from fullshard.torch_private.fsdp import compute_dtype
from fullshard.training import plain_loop

logger = logging.getLogger("fullshard")

T = TypeVar("T")
_MOMENTS = {"fp32": None, "bf16": torch.bfloat16}


def shard(
    model: nn.Module,
    plan: Plan,
    *,
    units: Predicate | None = None,
    init: Initialise | Literal["none"] | None = None,
    methods: Sequence[str] = (),
    offload: OffloadSettings | None = None,
) -> nn.Module:
    """Shards `model` in place according to `plan`, and sets its values. Returns the same module.

    A model on the meta device is initialised unit by unit, from `run.seed` and the model alone. A model with
    weights, on every rank or on rank 0 only, gets those of rank 0. A rank holds at most one whole unit.

    If the plan divides sequences over ranks, the attention of `model` reaches the keys of other ranks. If it
    divides matmuls, see `fullshard.parallel.tensor_parallel`; experts, `fullshard.parallel.expert_parallel`.

    units: predicate `units(name, module)` that overrides the plan's unit policy
    init: the initialiser, `init(module)`; by default the modules' own `reset_parameters`, then the model's
        `_init_weights(module)`. With "none", shards of meta parameters are NaN until a load
        (`load_pretrained`), and using offloaded state raises OffloadError until then.
    methods: names of methods of `model`, such as `generate`, for which FSDP2 gathers as for `forward`
    offload: other settings of the offloaded state than `offload_settings` returns for the plan

    Raises PlanError for another number of ranks, ShardError for a model that cannot be sharded this way
    (discard it), and OffloadError on all ranks if a drive lacks space. Emits MissingWeightsWarning.

    >>> with torch.device("meta"):  # each rank then allocates its own shards alone
    ...     model = fs.DecoderModel(run.decoder_config)
    >>> model = fs.shard(model, plan)
    >>> model.blocks[0].feed_forward.gate.weight.placements
    (Shard(dim=0),)
    """
    before = [weakref.ref(one) for one in model.parameters()]
    split = divide_model_and_return_split_dims(
        model, plan, rank=rank(), group_name=lambda axis: build_axis_group(plan, axis).group_name
    )
    prepared = apply.choose_sharding(model, plan, units=units, methods=methods, split=split)
    model_parameters.warn_of_modules_to_keep_in_fp32(model, plan.precision)
    given = model_parameters.collect_rank0_values(model)
    carried = model_parameters.ParameterAttributesAndHooks.of_model(model)
    if init != "none":
        model_parameters.warn_of_missing_weights(model, given, stacklevel=2)
    unit_order = apply.apply_recompute_and_fsdp_on_meta(model, prepared)
    state, order, keep = None, prepared.units, None
    if plan.run.offload.offloads_optimizer:
        state = OffloadedState(offload or offload_settings(plan, SYSTEM))
        given_some = any(name in given.tensors for name, _ in model.named_parameters())
        state.set_up_for_model(model, unset=init == "none" and not given_some)
        order, keep = apply.sort_units_by_registration(model, order), state.offload_unit_shards
    allocate_and_fill_shards(model, order, values=given, plan=plan, init=init, keep=keep)
    if state is not None:
        state.finish_offloading_shards()
        set_offloaded_state(model, state)
    if prepared.fp8 is not None:
        set_up_fp8_gathers(model, prepared.fp8, device=prepared.device, methods=prepared.methods)
    carried.set_on(model)
    install_reshard_after_evaluation(model, unit_order)
    plain_loop.guard_sharded_model(model, before=before)
    return model


def build_streaming_adamw(
    model: nn.Module, groups: list[dict[str, Any]], *, plan: Plan
) -> adamw.StreamingAdamW:
    """Returns the AdamW that updates the model's offloaded state. Raises ShardError if it has none."""
    offloaded = find_offloaded_state(model)
    if offloaded is None:
        raise ShardError(
            f"{type(model).__name__} was sharded without the plan's tier.",
            got=f'offload.tier = "{plan.run.offload.tier}"',
            fix="model = fullshard.shard(model, plan), which keeps its state outside",
        )
    section, settings = plan.run.optimizer, offloaded.settings
    gradients = adamw.HostGradients(offloaded.engine) if settings.has_gpu else None
    on_device = None
    if plan.run.offload.update == "device":
        on_device = adamw.DeviceUpdater(offloaded.groups, device=settings.device, moments=settings.moments)
    return adamw.StreamingAdamW(
        groups,
        offloaded,
        gradients=gradients,
        defaults=AdamOptions(section.learning_rate, *section.betas, section.eps, 0.0),
        seed=plan.run.run.seed,
        on_device=on_device,
    )


def rank_offload_directory(plan: Plan, *, rank: int) -> Path:
    """Returns the directory of a rank's offload files, below `offload.path` (relative to `run.dir`)."""
    path, root = Path(plan.run.offload.path), Path(plan.run.run.dir).absolute()
    if not path.is_absolute():
        return directories.rank_directory(root / path, run_id="state", rank=rank)
    name = f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
    return directories.rank_directory(path, run_id=name, rank=rank)


def discard_offloaded_files(plan: Plan) -> None:
    """Removes this rank's offload files from the drive. Raises OffloadError."""
    if plan.run.offload.is_on_drive:
        discard_rank_directory(rank_offload_directory(plan, rank=rank()))


def close_offloaded_state(model: nn.Module, *, plan: Plan, finished: bool) -> None:
    """Closes the model's offloaded state, if any, at the end of a run.

    finished: also remove this rank's offload files, because the last checkpoint holds everything
    """
    offloaded = find_offloaded_state(model)
    if offloaded is not None:
        offloaded.wait_for_update()
        offloaded.close()
        if finished:
            discard_offloaded_files(plan)
            # An absolute path belongs to the user, so only the run's directories in that path are removed.
            path, own = Path(plan.run.offload.path), rank_offload_directory(plan, rank=rank())
            inside = not path.is_absolute() and ".." not in path.parts
            top = Path(plan.run.run.dir).absolute() if inside else own.parent.parent
            directories.remove_empty_parents(own, up_to=top)


def offload_settings(plan: Plan, system: DriveSystemCalls) -> OffloadSettings:
    """Returns the settings that `OffloadedState` takes, from the plan's `offload` section."""
    section, traffic = plan.run.offload, DriveCounters()
    system = traffic.wrap_system_calls(system)
    open_store = partial(_open_store_dropping_stale_files, plan, system=system)
    shards_on_drive = section.is_on_drive and section.offloads_parameters
    return OffloadSettings(
        device=local_device(plan),
        sub_group_parameters=section.sub_group_parameters,
        shards_outside=section.offloads_parameters,
        moments=_MOMENTS[section.moments],
        on_drive=open_store if section.is_on_drive else None,
        shards_on_drive=partial(_open_drive_shards, plan, system=system) if shards_on_drive else None,
        traffic=traffic,
    )


def _open_drive_shards(  # signature: `OffloadSettings.shards_on_drive`, after the bound arguments
    plan: Plan,
    engine: Mapping[str, Any],
    units: Mapping[str, int],
    *,
    are_frozen: bool,
    system: DriveSystemCalls,
) -> DriveShards:
    path = rank_offload_directory(plan, rank=rank()) / ("frozen.data" if are_frozen else "parameters.data")
    device, dtype_of = local_device(plan), master_dtype if are_frozen else compute_dtype
    return _open_on_all_ranks(
        lambda: DriveShards(engine, units, path=path, device=device, dtype_of=dtype_of, system=system),
        close=lambda one: one.make_close_function()(),
    )


def _open_store_dropping_stale_files(
    plan: Plan, groups: Sequence[OffloadGroup], *, system: DriveSystemCalls
) -> DriveStore:
    """Opens this rank's store. Removes files of other rank counts, and generations that some ranks lack."""
    moments = _MOMENTS[plan.run.offload.moments]
    records: list[directories.DataFileRegion] = []
    end = 0
    for group in groups:
        size = GroupRecord(group, moments=moments).size_bytes
        records.append(directories.DataFileRegion(name=str(group.index), offset_bytes=end, length_bytes=size))
        end += size
    directory = rank_offload_directory(plan, rank=rank())
    layouts = [(g.dtype, [(s.name, s.begin, s.end, s.offset) for s in g.segments]) for g in groups]
    identity = directories.RunRankIdentity(
        run_id=directory.parent.name,
        rank=rank(),
        world_size=plan.world_size,
        layout=hashlib.sha256(json.dumps([plan.run.offload.moments, layouts]).encode()).hexdigest()[:32],
    )

    def open_or_recreate_generations() -> GenerationFiles:
        try:
            return GenerationFiles(directory, records, identity=identity, system=system)
        except ForeignOffloadError as error:
            if directories.read_world_size(directory) in (None, plan.world_size):
                raise
            # The number of ranks changed, so these files have another layout. The checkpoint has the state.
            what = error.what.removesuffix(".")
            logger.warning("%s: it was kept by another number of ranks, and is removed", what)
            discard_rank_directory(directory)
            return GenerationFiles(directory, records, identity=identity, system=system)

    generations = _open_on_all_ranks(open_or_recreate_generations, close=GenerationFiles.close)
    with ExitStack() as unless_whole:
        unless_whole.callback(generations.close)
        store = DriveStore(groups, generations, moments=moments, pinned=plan.device == "cuda")
        _keep_newest_common_generation(store)
        unless_whole.pop_all()
    return store


def _open_on_all_ranks(opened: Callable[[], T], *, close: Callable[[T], None]) -> T:
    """Returns the result of `opened`. If any rank failed, closes it and raises OffloadError. Collective."""
    own: OffloadError | None = None
    with ExitStack() as stack:
        found: list[T] = []
        try:
            found.append(opened())
            stack.callback(close, found[0])
        except OffloadError as error:
            own = error
        failed = [(i, one) for i, one in enumerate(all_gather_object(own)) if one is not None]
        if own is not None:
            raise own
        for i, one in failed:
            raise type(one)(f"rank {i}: {one.what}", got=one.got, why=one.why, fix=one.fix)
        stack.pop_all()
    return found[0]


def _keep_newest_common_generation(store: DriveStore) -> None:
    """Drops every generation except the newest that all ranks can train on. Collective.

    Must precede the first write, which replaces the older generation: other ranks may have only that one.
    """
    generations = store.generations
    while True:
        own = {one.step: one for one in generations.list_complete_generations()}
        common = max(set[int].intersection(*all_gather_object(set(own))), default=None)
        if common is None or all_ranks_have(_is_generation_usable(store, own[common])):
            break
        generations.invalidate_generation(own[common].slot)
    for step, one in own.items():
        if step != common:
            generations.invalidate_generation(one.slot)


def _is_generation_usable(store: DriveStore, one: Generation) -> bool:
    try:
        check_generation_and_reset_store(store, one)
    except OffloadError as error:  # also raised if the drive cannot read it
        logger.warning("the state after step %d cannot be used: %s", one.step, error)
        return False
    return True
