"""Offloaded state of one rank: masters and moments of its trained shards, and the shards to gather.

[Note: the next forward need not wait] An update visits the groups in the order in which units are gathered.
Each gather waits for its own unit only, so that the end of an update, and its writes, run during the next
forward and backward. `wait_for_all_work` is called before the next update, and before other code reads the
state.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.host import make_device_thread
from fullshard.distributed.tensors import detached_local_tensor
from fullshard.errors import OffloadError
from fullshard.offload import gather_source
from fullshard.offload.drive import DriveCounters
from fullshard.offload.store import GroupStore, HostMemoryStore, MasterAndMoments, master_and_moment_dtypes
from fullshard.spec import groups
from fullshard.spec.groups import OffloadGroup, ShardSegment
from fullshard.torch_private.fsdp import compute_dtype, padded_shard_shape, shard_shape
from fullshard.torch_private.tensors import local_part, set_local_part

Update = Callable[[OffloadGroup, MasterAndMoments], None]


class DriveShardsFactory(Protocol):
    """Makes a source of shards on a drive, in their own dtype if `are_frozen`, else in the compute dtype.

    engine: FSDP2's object of each parameter, by name
    units: number of the unit that gathers each parameter, by name
    """

    def __call__(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, are_frozen: bool
    ) -> gather_source.SeparateShardSource: ...


@dataclass(frozen=True)
class OffloadSettings:
    """Placement and grouping of offloaded state.

    device: the device that computes
    sub_group_parameters: largest number of elements of a group
    shards_outside: offloads the shards in the compute dtype, and frozen shards, as well
    moments: dtype of the moments; None for the master's
    on_drive: makes the drive store of these groups; None for host memory
    shards_on_drive: makes the drive source of shards, if `shards_outside`; None for host memory
    traffic: counters of the bytes that all these read from and write to the drive
    """

    device: torch.device
    sub_group_parameters: int
    shards_outside: bool = False
    moments: torch.dtype | None = None
    on_drive: Callable[[Sequence[OffloadGroup]], GroupStore] | None = None
    shards_on_drive: DriveShardsFactory | None = None
    traffic: DriveCounters = field(default_factory=DriveCounters)

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_state_on_device(self) -> bool:
        """True if the state is in the device's own memory, because the device is the host."""
        return self.on_drive is None and not self.has_gpu

    def make_shard_source(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, are_frozen: bool = False
    ) -> gather_source.SeparateShardSource:
        """Makes the source from which parameters are gathered. Arguments: see `DriveShardsFactory`."""
        if self.shards_on_drive is not None and engine:
            return self.shards_on_drive(engine, units, are_frozen=are_frozen)
        home = torch.device("cpu") if self.shards_outside else self.device
        pinned = self.has_gpu and self.shards_outside
        dtype_of = gather_source.master_dtype if are_frozen else compute_dtype
        return gather_source.ShardCopies(
            engine, home=home, device=self.device, pinned=pinned, dtype_of=dtype_of
        )


class OffloadedState:
    """Offloaded state of one sharded model on one rank. `fullshard.shard` fills it.

    names: parameters whose state is offloaded (the trained, sharded ones), in the order of use
    names_of: name of each of these parameters, by its tensor
    engine: FSDP2's object of each of these parameters, by name
    masters: by name, the masters that are also FSDP2's shards; empty if the device does not have them
    shards: source from which trained parameters are gathered
    frozen: offloaded frozen parameters
    updates: thread that runs updates during training
    close: waits for running work and closes the drive's files, as dropping the last reference does
    """

    def __init__(self, settings: OffloadSettings) -> None:
        self.settings = settings
        self.groups: tuple[OffloadGroup, ...] = ()
        self.engine: dict[str, Any] = {}
        self._units: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        self.names_of: Mapping[Tensor, str] = {}
        self._release: Callable[[str], object] = lambda _name: None

    # For `fullshard.shard`

    def set_up_for_model(self, model: nn.Module, *, unset: bool = False) -> None:
        """Sets up stores for the model, whose parameters have no values yet.

        unset: a load sets the values; until then, uses raise OffloadError, unless the device has the state
        """
        held: list[groups.ShardSizes] = []
        frozen: dict[str, Any] = {}
        for unit, name, one in gather_source.iterate_sharded_parameters(model):
            if self._units.setdefault(name, unit) != unit:
                continue
            if not one.sharded_param.requires_grad:
                frozen[name] = one
                continue
            self.engine[name] = one
            numel, most = shard_shape(one).numel(), padded_shard_shape(one).numel()
            held.append(groups.ShardSizes(name, numel=numel, max_numel=most, dtype=_master_dtype_name(one)))
        self.names = tuple(self.engine)
        self.names_of = {one.sharded_param: name for name, one in self.engine.items()}
        self.groups = groups.group_shards(held, sub_group_parameters=self.settings.sub_group_parameters)
        self._own = tuple(group for group in self.groups if group.segments)
        self._make_stores_and_thread(frozen)
        self._filling: _InitialValueWriter | None = None
        if unset and not self.settings.is_state_on_device:
            self.updates.unusable = not_loaded_error
            self.updates.frozen_unusable = not_loaded_error if self.frozen.engine else None
        else:
            self._filling = _InitialValueWriter(self.store, self._write_segment_to_shard)

    def offload_unit_shards(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Stores a unit's values, if set, and makes FSDP2 gather them from there. Called in order of use."""
        engine = offloaded_fsdp_params(self)
        own = {n: detached_local_tensor(p).reshape(-1) for n, p in parameters.items() if n in engine}
        if self._filling is not None:
            self._filling.write_unit_values(own)
            self.frozen.store_unit_shards(own)
        for name in own:
            source = partial(self._read_shard_once_updated, name)
            gather_source.redirect_all_gather(engine[name], source, local=self.masters.get(name))

    def finish_offloading_shards(self) -> None:
        """Completes the stores after the last unit, and waits until all values are stored."""
        if self._filling is not None:
            self._filling.check_all_written()
        self.frozen.shards.wait_for_writes()
        self.updates.wait_for_all_work(to_load=True)

    # For optimizers and checkpoints

    def start_update(self, function: Update, *, release: Callable[[str], object]) -> None:
        """Starts `function` on every group, on the update thread: see [Note: the next forward need not wait].

        `release` is called with a parameter's name, not on that thread, after its update: when it is
        gathered, or by `wait_for_update`. If the device has the state, returns when the update has ended.
        """
        self.wait_for_update()
        self.settings.traffic.mark_update_start()
        self._release = release
        left = Counter(self._units[segment.name] for group in self._own for segment in group.segments)
        self.shards.prepare_for_update()

        @torch.no_grad()
        def update_all_groups() -> None:
            for group, parts in self.store.stream_for_update():
                function(group, parts)
                for segment in group.segments:
                    self._write_segment_to_shard(segment, parts)
                    unit = self._units[segment.name]
                    left[unit] -= 1
                    if not left[unit]:
                        self.updates.mark_unit_updated(unit)
            self.store.prefetch_first_groups()

        self.updates.submit_update(update_all_groups, units=tuple(left))
        if self.settings.is_state_on_device:
            self.wait_for_update()  # the update would only compete with the caller for the processor

    def wait_for_update(self, *, to_load: bool = False) -> None:
        """Waits until no update is running. Raises as `UpdateThread.wait_for_all_work` does."""
        try:
            self.updates.wait_for_all_work(to_load=to_load)
        finally:
            for name in self.names:
                self._release(name)

    def parameter_state_tensors(self, name: str) -> dict[str, Tensor]:
        """Returns `master`, `exp_avg` and `exp_avg_sq` of a parameter as DTensors, not to be changed.

        State on a drive is read when a tensor is used, and stays readable until the second update from now.
        """
        return self._parts_as_dtensors(name, self.store.read_parameter_state(name))

    def iterate_tensors_to_fill(self, *, frozen: bool = False) -> Generator[dict[str, dict[str, Tensor]]]:
        """Yields tensors to fill with new values, in portions of the state: {name: {key: tensor}}.

        The tensors are stored when the next portion is requested. Every rank gets the same portions. After an
        interrupted iteration, the state is unusable until a complete one.

        frozen: includes frozen parameters
        """
        self.wait_for_update(to_load=True)
        self.updates.unusable = half_loaded_error
        self.shards.prepare_for_update()
        stream = self.store.stream_for_update(fresh=True)
        for portion in groups.join_groups_of_split_parameters(self.groups):
            names = dict.fromkeys(name for group in portion for name in group.names)
            new = {name: self.store.parameter_state_to_fill(name) for name in names}
            yield {name: self._parts_as_dtensors(name, parts) for name, parts in new.items()}
            for _ in filter(lambda group: group.segments, portion):
                group, parts = next(stream)
                for segment in group.segments:
                    _copy_segment(new[segment.name], parts, segment=segment)
                    self._write_segment_to_shard(segment, parts)
        next(stream, None)
        self.updates.wait_for_all_work(to_load=True)
        self.updates.unusable = None
        if frozen and self.frozen.engine:
            self.updates.frozen_unusable = partial(half_loaded_error, "the frozen parameters were")
            for new in self.frozen.iterate_tensors_to_fill():
                yield {name: {"master": own} for name, own in new.items()}
            self.updates.frozen_unusable = None

    def rewrite_shards_from_masters(self, *, verify: bool) -> None:
        """Rewrites all shards from the masters, which makes the state usable. `verify`: checks digests."""
        self.shards.prepare_for_update()
        for group, parts in self.store.stream_read_only(verify=verify):
            for segment in group.segments:
                self._write_segment_to_shard(segment, parts)
        self.updates.unusable = None

    def _make_stores_and_thread(self, frozen: Mapping[str, Any]) -> None:
        settings, engine, own = self.settings, self.engine, self._own
        if settings.on_drive is None:
            self.store: GroupStore = HostMemoryStore(own, moments=settings.moments, pinned=settings.has_gpu)
        else:
            self.store = settings.on_drive(own)
        self.masters: dict[str, Tensor] = {}
        for name, one in engine.items() if settings.is_state_on_device else ():
            parts = self.store.read_parameter_state(name)
            empty = torch.empty(0, dtype=gather_source.master_dtype(one))
            self.masters[name] = empty if parts is None else parts.master
        with ExitStack() as closing:
            closing.callback(self.store.close)
            if settings.is_state_on_device:
                self.shards: gather_source.GatherSource = gather_source.MasterCastingSource(
                    self.masters, engine
                )
            else:
                self.shards = settings.make_shard_source(engine, self._units)
            closing.callback(self.shards.make_close_function())
            stays = settings.is_state_on_device or not settings.shards_outside
            others = dict[str, Any]() if stays else frozen
            kept = settings.make_shard_source(others, self._units, are_frozen=True)
            self.frozen = gather_source.OffloadedFrozenParameters(others, self._units, shards=kept)
            closing.callback(self.frozen.shards.make_close_function())
            self.updates = UpdateThread((self.store, self.shards))
            closing.callback(self.updates.thread.shutdown)
            # The callbacks must not reference the model, which references this: neither would be freed.
            self.close = weakref.finalize(self, closing.pop_all().close)

    def _parts_as_dtensors(self, name: str, parts: MasterAndMoments | None) -> dict[str, Tensor]:
        """Returns the parts as DTensors with the parameter's placements; empty ones if `parts` is None."""
        one = self.engine[name]
        if parts is None:
            dtypes = master_and_moment_dtypes(_master_dtype_name(one), self.settings.moments)
            parts = MasterAndMoments(*(torch.empty(0, dtype=dtype) for dtype in dtypes))
        return {key: gather_source.dtensor_like(one, part) for key, part in parts._asdict().items()}

    def _write_segment_to_shard(self, segment: ShardSegment, parts: MasterAndMoments) -> None:
        values = parts.master[segment.slice_in_group]
        self.shards.write_shard_elements(segment.name, segment.begin, values=values)

    @torch.no_grad()
    def _read_shard_once_updated(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns this rank's shard once its unit is updated. Called by FSDP2 in an all-gather."""
        self.updates.wait_for_unit_update(self._units[name])
        if name in self.frozen.engine:
            return self.frozen.shards.read_padded_shard(name, dtype)
        self._release(name)
        return self.shards.read_padded_shard(name, dtype)


def offloaded_host_bytes(offloaded: OffloadedState) -> int:
    """Returns the bytes of host memory that the state takes, without gradients."""
    return offloaded.store.host_bytes + offloaded.shards.host_bytes + offloaded.frozen.shards.host_bytes


def offloaded_fsdp_params(offloaded: OffloadedState) -> dict[str, Any]:
    """Returns FSDP2's objects of all offloaded parameters, trained or frozen, by name."""
    return {**offloaded.engine, **offloaded.frozen.engine}


def find_parameters_with_offloaded_values(offloaded: OffloadedState) -> set[Tensor]:
    """Returns the parameters whose values are not in the model's own tensors."""
    engine = dict[str, Any]() if offloaded.settings.is_state_on_device else offloaded_fsdp_params(offloaded)
    return {one.sharded_param for one in engine.values()}


def iterate_parameters_to_load(offloaded: OffloadedState) -> Iterator[set[Tensor]]:
    """Yields sets of parameters whose values the caller sets before the next set. Moments become zero."""
    engine = offloaded_fsdp_params(offloaded)
    for portion in offloaded.iterate_tensors_to_fill(frozen=True):
        own = {name: engine[name].sharded_param for name in portion}
        stands = {name: local_part(parameter) for name, parameter in own.items()}
        for name, new in portion.items():
            set_local_part(own[name], cast(DTensor, new["master"]).to_local())
            for key in new.keys() - {"master"}:
                cast(DTensor, new[key]).to_local().zero_()
        try:
            yield set(own.values())
        finally:
            for name, local in stands.items():
                set_local_part(own[name], local)


class _InitialValueWriter:
    """Writes initial values into a new store, in the order of its groups. Moments are zero."""

    def __init__(self, store: GroupStore, publish: Callable[[ShardSegment, MasterAndMoments], None]) -> None:
        stream = store.stream_for_update(fresh=True)
        self._segments = ((segment, parts) for group, parts in stream for segment in group.segments)
        self._next, self._publish = next(self._segments, None), publish

    def write_unit_values(self, values: Mapping[str, Tensor]) -> None:
        while self._next is not None and self._next[0].name in values:
            segment, parts = self._next
            parts.master[segment.slice_in_group].copy_(values[segment.name][segment.slice_in_shard])
            self._publish(segment, parts)
            self._next = next(self._segments, None)

    def check_all_written(self) -> None:
        assert self._next is None, "every unit was offered, in the order of use"


def _copy_segment(new: MasterAndMoments | None, parts: MasterAndMoments, *, segment: ShardSegment) -> None:
    assert new is not None, "the rank has rows of it"
    for source, target in zip(new, parts, strict=True):
        own, into = source[segment.slice_in_shard], target[segment.slice_in_group]
        if own.data_ptr() != into.data_ptr():
            into.copy_(own)


def _master_dtype_name(one: Any) -> str:
    return str(gather_source.master_dtype(one)).removeprefix("torch.")


_ATTRIBUTE = "_fullshard_offloaded"  # attribute of the model


def set_offloaded_state(model: nn.Module, state: OffloadedState) -> None:
    """Stores `state` as an attribute of its model, where `find_offloaded_state` finds it."""
    setattr(model, _ATTRIBUTE, state)


def find_offloaded_state(model: nn.Module) -> OffloadedState | None:
    """Returns the offloaded state of a model, or None if it has no offloaded state."""
    return getattr(model, _ATTRIBUTE, None)


Lacking = Callable[[], OffloadError]


class UpdateThread:
    """Runs submitted work in order on one thread, and stops after the first failure.

    stores: the stores whose writes belong to the work
    unusable: makes the error of all uses except a load, while values are missing or from two states; or None
    frozen_unusable: makes this error for frozen parameters; or None
    """

    def __init__(self, stores: Sequence[GroupStore | gather_source.GatherSource]) -> None:
        self._stores = stores
        self.unusable: Lacking | None = None
        self.frozen_unusable: Lacking | None = None
        self.thread = make_device_thread("offload-update")
        self._running: list[Future[None]] = []
        self._pending: dict[int, threading.Event] = {}
        self._error: BaseException | None = None

    def submit_update(self, act: Callable[[], None], *, units: Iterable[int]) -> None:
        """Submits an update, `act`, which calls `mark_unit_updated` for each of `units`."""
        self._pending = {unit: threading.Event() for unit in units}
        self.submit(act)

    def submit(self, act: Callable[[], None]) -> None:
        """Queues `act`, which the thread runs after all earlier work, or drops if any of that failed."""
        future = self.thread.submit(lambda: None if self._error else act())
        future.add_done_callback(self._record_failed_work)
        self._running.append(future)

    def mark_unit_updated(self, unit: int) -> None:
        self._pending[unit].set()

    def wait_for_unit_update(self, unit: int) -> None:
        """Waits until the unit is updated. Raises OffloadError if work failed or the state is unusable."""
        if (event := self._pending.get(unit)) is not None:
            event.wait()
        self._raise_if_unusable()

    def wait_for_all_work(self, *, to_load: bool = False) -> None:
        """Waits until no work is running.

        Raises the error of failed work, in this call and every later call; unless `to_load`, also `unusable`
        and `frozen_unusable`.
        """
        running, self._running = self._running, []
        for future in running:
            future.exception()  # waits; `_record_failed_work` has recorded the error
        if self._error is None:
            try:
                for store in self._stores:
                    store.wait_for_writes()
            except OffloadError as error:
                self._error = error
        self._raise_if_unusable(to_load=to_load)

    def _record_failed_work(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._error = error
            for event in self._pending.values():
                event.set()

    def _raise_if_unusable(self, *, to_load: bool = False) -> None:
        error = self._error
        lacking = None if to_load else self.unusable or self.frozen_unusable
        if error is None and lacking is not None:
            raise lacking()
        if error is None:
            return
        if not isinstance(error, OffloadError):
            raise error
        got, why = (f" {part}" if part else "" for part in (error.got, error.why and f"{error.why}, and"))
        fix = f"{error.fix}; then " if error.fix else ""
        raise type(error)(
            "the optimizer's state could not be updated.",
            got=f"{error.what.removesuffix('.')}:{got}" if got else error.what,
            why=f"{why} the state in memory belongs to no single step".strip(),
            fix=f"{fix}start again with --resume, which resumes from the newest complete state",
        ) from error


def half_loaded_error(what: str = "the optimizer's state was") -> OffloadError:
    """Returns the error for state that an interrupted load has set in part."""
    return OffloadError(
        f"{what} loaded in part.",
        why="an error ended the load, so the state is a mixture of two",
        fix="load a complete state, or resume from a checkpoint",
    )


def not_loaded_error() -> OffloadError:
    """Returns the error for a model that has no values yet."""
    return OffloadError(
        "the model has no values yet.",
        why='fullshard.shard(..., init="none") leaves them to a load',
        fix="fullshard.load_pretrained(model, directory, plan=plan), or a checkpoint, before",
    )
