"""What a rank keeps outside of the device: masters and moments of its trained shards, and shards."""

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import OffloadError
from fullshard.offload.drive_counters import DriveCounters
from fullshard.offload.frozen import Frozen
from fullshard.offload.fsdp_params import (
    compute_dtype,
    dtensor_like,
    gathered_parameters,
    local_shape,
    padded_shape,
    redirect_all_gather,
    shard_dtype,
)
from fullshard.offload.gather_source import GatherSource, MasterShards, SeparateShards, ShardCopies
from fullshard.offload.lazy_tensor import lazy_tensor
from fullshard.offload.store import GroupStore, HostStore, Parts, dtypes_of
from fullshard.offload.update_thread import UpdateThread, base_half_loaded, half_loaded, not_loaded
from fullshard.spec.groups import Group, Segment, ShardSize, group_shards, portions

Update = Callable[[Group, Parts], None]


class ShardsOnDrive(Protocol):
    """Makes shards on a drive, of the engine's parameters and the number of the unit that gathers each, in
    the dtype computed in, or, `frozen`, in their own."""

    def __call__(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, frozen: bool
    ) -> SeparateShards: ...


@dataclass(frozen=True)
class Settings:
    """How and where. `on_drive`: what makes the store of these groups; None: the host's memory.

    `shards_outside`: the shards in the dtype computed in, and those that are frozen, are not on the device
    either; `shards_on_drive`: but in what this makes. `moments`: their dtype; None: the master's.
    `alternate`: every other update goes through the groups from the last to the first: those that are still
    in memory need not be read, and the next forward waits for all. `traffic`: counts what the drive moves.
    """

    device: torch.device
    group_parameters: int
    shards_outside: bool = False
    moments: torch.dtype | None = None
    alternate: bool = False
    on_drive: Callable[[Sequence[Group]], GroupStore] | None = None
    shards_on_drive: ShardsOnDrive | None = None
    traffic: DriveCounters = field(default_factory=DriveCounters)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_device(self) -> bool:
        """Where the state is: the host's memory is the device's."""
        return self.on_drive is None and not self.on_gpu

    def shards_of(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, frozen: bool = False
    ) -> SeparateShards:
        """What is gathered of these, as `ShardsOnDrive` has it."""
        if self.shards_on_drive is not None and engine:
            return self.shards_on_drive(engine, units, frozen=frozen)
        home = torch.device("cpu") if self.shards_outside else self.device
        pinned, dtype_of = self.on_gpu and self.shards_outside, shard_dtype if frozen else compute_dtype
        return ShardCopies(engine, home=home, device=self.device, pinned=pinned, dtype_of=dtype_of)


class OffloadedState:
    """Of one sharded model on one rank. Made while `fullshard.shard` gives it values; see `Keeper` there.

    `names`: of the parameters whose state it has, in the order of use: those that are trained and sharded.
    `names_of`: the same, by the parameters. `engine`: the engine's object of each. `masters`: the master of
    each, where the engine's shards are the masters; elsewhere they stand for them, and are NaN.
    `shards`: what the engine gathers; `frozen`: what it gathers of those that are not trained, and are not on
    the device, as `elsewhere` says of each. `updates`: what goes on beside training.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.groups: tuple[Group, ...] = ()
        self.engine: dict[str, Any] = {}
        self._units: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        self.names_of: Mapping[Tensor, str] = {}
        self._release: Callable[[str], None] = lambda _name: None
        self._backwards = False

    # What `fullshard.sharding.apply.Keeper` asks for

    def start(self, model: nn.Module, *, unset: bool = False) -> None:
        """The engine has the parameters, without values; `unset`: nor will `take` bring any, and a load must,
        so that what is not the device's is not written twice."""
        held: list[ShardSize] = []
        frozen: dict[str, Any] = {}
        for unit, name, one in gathered_parameters(model):
            if self._units.setdefault(name, unit) != unit:
                continue
            if not one.sharded_param.requires_grad:
                frozen[name] = one
                continue
            self.engine[name] = one
            dtype, most = str(shard_dtype(one)).removeprefix("torch."), padded_shape(one).numel()
            held.append(ShardSize(name, numel=local_shape(one).numel(), most=most, dtype=dtype))
        self.names = tuple(self.engine)
        self.names_of = {one.sharded_param: name for name, one in self.engine.items()}
        self.groups = group_shards(held, group_parameters=self.settings.group_parameters)
        self._own = tuple(group for group in self.groups if group.segments)
        self._make(frozen)
        self._filling: _Filling | None = None
        if unset and not self.settings.is_device:
            self.updates.unusable = not_loaded
            self.updates.base_unusable = not_loaded if self.frozen.engine else None
        else:
            self._filling = _Filling(self.store.stream(self._own, fresh=True), self._publish)

    def put_unit(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The values of one unit's parameters; the units come in the order of use. Their memory is let go."""
        engine = fsdp_params(self)
        own = {name: _flat(p) for name, p in parameters.items() if name in engine}
        if self._filling is not None:
            self._filling.offer(own)
            self.frozen.put(own)
        for name in own:
            redirect_all_gather(
                engine[name], partial(self._shard_for_gather, name), local=self.masters.get(name)
            )

    def finish(self) -> None:
        """Of all units."""
        if self._filling is not None:
            self._filling.end()
        self.frozen.shards.settle()
        self.updates.settle(to_load=True)

    # What an optimizer and a checkpoint ask for

    def update(self, function: Update, *, release: Callable[[str], None]) -> None:
        """Has `function` change the parts of every group: see [Note: the next forward need not wait].
        `release`: called in the caller's thread once a parameter is updated; with all of them by the next
        `settle`."""
        self.settle()
        self.settings.traffic.begin_update()
        self._release = release
        order = self._order()
        segments = [segment.name for group in order for segment in group.segments]
        left = Counter(self._units[name] for name in segments)
        backwards = self._backwards
        self.shards.begin(backwards=backwards)
        self._backwards = self.settings.alternate and not self._backwards
        following = self._order()

        def published(name: str) -> None:
            unit = self._units[name]
            left[unit] -= 1
            if not left[unit]:
                self.updates.unit_done(unit)

        @torch.no_grad()
        def update() -> None:
            for group, parts in self.store.stream(order):
                function(group, parts)
                for segment in _publishing(self.shards, group, parts=parts, backwards=backwards):
                    published(segment.name)
            self.store.read_ahead(following)

        self.updates.begin(update, units=tuple(left))
        if self.settings.is_device:
            self.settle()  # nothing to wait for but the processor, which the caller wants too

    def settle(self, *, to_load: bool = False) -> None:
        """Returns when no update goes on. Raises OffloadError for what failed, now and ever after, and where
        a load was broken off, unless it is `to_load` again."""
        try:
            self.updates.settle(to_load=to_load)
        finally:
            for name in self.names:
                self._release(name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """`master`, `exp_avg`, `exp_avg_sq` of a parameter, placed as it is; not to be changed. Of state on
        a drive each is read when it is used: until the update after the next one it is what it is now."""
        return _placed(self.engine[name], self.store.read_parts(name), moments=self.settings.moments)

    def live_tensors(self, name: str) -> dict[str, Tensor]:
        """The same, but always what the last update has left, as the host's memory has it: of state on a
        drive each is read when it is used, and what is there then counts. During `refill` that is what was
        there before. Reading raises OffloadError where the state is let go, or cannot be read."""
        parts = self.store.read_parts(name)
        if parts is not None and self.settings.on_drive is not None:
            # A state dict that somebody keeps does not keep the model, and the lock of its directory.
            me: weakref.ref[OffloadedState] = weakref.ref(self)
            reads = [partial(_now, me, name, part=part) for part in range(len(parts))]
            pairs = zip(parts, reads, strict=True)
            parts = Parts(*(lazy_tensor(one.shape, one.dtype, read=read) for one, read in pairs))
        return _placed(self.engine[name], parts, moments=self.settings.moments)

    def refill(self, *, keep: bool = False, frozen: bool = False) -> Generator[dict[str, dict[str, Tensor]]]:
        """Gives new values to all state, in portions: yields name -> key -> a tensor to be filled, placed as
        the parameter; what stands in them when the next portion is asked for is taken over. On every rank
        there are as many portions, of the same names.

        Where it is broken off, nothing can be done with the state but to fill it again. `keep`: what is
        `living` can be read for the new values. `frozen`: what is frozen gets new values, too.
        """
        self.settle(to_load=True)
        if keep:
            self.store.retain_previous()
        self.updates.unusable = half_loaded
        self.shards.begin(backwards=True)  # nobody gathers meanwhile
        stream = self.store.stream(self._own, fresh=True)
        for portion in portions(self.groups):
            names = dict.fromkeys(name for group in portion for name in group.names)
            new = {name: self.store.allocate_parts(name) for name in names}
            moments = self.settings.moments
            yield {n: _placed(self.engine[n], parts, moments=moments) for n, parts in new.items()}
            for _ in filter(lambda group: group.segments, portion):
                group, parts = next(stream)
                for segment in group.segments:
                    _copy(new[segment.name], parts, segment=segment)
                self._publish(group, parts)
        next(stream, None)
        self.updates.settle(to_load=True)
        self.updates.unusable = None
        if frozen and self.frozen.engine:
            self.updates.base_unusable = base_half_loaded
            for new in self.frozen.refill():
                yield {name: {"master": own} for name, own in new.items()}
            self.updates.base_unusable = None

    def publish_all(self, *, verify: bool) -> None:
        """What is gathered follows the masters anew; `verify`: all that is read is held against digests."""
        self.shards.begin(backwards=True)
        for group, parts in self.store.read_stream(self._own, verify=verify):
            self._publish(group, parts)
        self.updates.unusable = None

    def close(self) -> None:
        """Lets go of the drive, when what goes on is through. Without it that is done with the last
        reference."""
        self.closing()

    def _order(self) -> tuple[Group, ...]:
        """Of the next update."""
        return self._own[::-1] if self._backwards else self._own

    def _make(self, frozen: Mapping[str, Any]) -> None:
        settings, engine = self.settings, self.engine
        if settings.on_drive is None:
            host = HostStore(self._own, moments=settings.moments, pinned=settings.on_gpu)
            self.store: GroupStore = host
        else:
            host, self.store = None, settings.on_drive(self._own)
        self.masters: dict[str, Tensor] = {}
        if host is not None and settings.is_device:
            for name, one in engine.items():
                whole = host.read_parts(name)
                none = torch.empty(0, dtype=one.sharded_param.dtype)
                self.masters[name] = none if whole is None else whole.master
        with ExitStack() as closing:
            closing.callback(self.store.close)
            if settings.is_device:
                self.shards: GatherSource = MasterShards(self.masters, engine)
            else:
                self.shards = settings.shards_of(engine, self._units)
            closing.callback(self.shards.closing())
            stays = settings.is_device or not settings.shards_outside
            others = dict[str, Any]() if stays else frozen
            kept = settings.shards_of(others, self._units, frozen=True)
            self.frozen = Frozen(others, self._units, shards=kept)
            closing.callback(self.frozen.shards.closing())
            self.updates = UpdateThread(
                partial(_settle, self.store, self.shards), hurried=self.shards.hurried
            )
            closing.callback(self.updates.thread.shutdown)
            # Nothing that knows the model: it knows this, and neither would ever be let go.
            self.closing = weakref.finalize(self, closing.pop_all().close)

    def _publish(self, group: Group, parts: Parts) -> None:
        for _ in _publishing(self.shards, group, parts=parts):
            pass

    @torch.no_grad()
    def _shard_for_gather(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's shard, when its unit is updated. Called by the engine, when it gathers."""
        self.updates.wait_for(self._units[name])
        if name in self.frozen.engine:
            return self.frozen.shards.read(name, dtype)
        self._release(name)
        return self.shards.read(name, dtype)


def _publishing(
    shards: GatherSource, group: Group, *, parts: Parts, backwards: bool = False
) -> Iterator[Segment]:
    """Its segments, published; of a unit that goes on in another group none comes in between."""
    for segment in reversed(group.segments) if backwards else group.segments:
        values = parts.master[segment.offset : segment.offset + segment.numel]
        shards.write(segment.name, segment.begin, values=values)
        yield segment


def host_bytes_of(offloaded: OffloadedState) -> int:
    """What it takes of the host's memory, gradients left out."""
    return offloaded.store.host_bytes + offloaded.shards.host_bytes + offloaded.frozen.shards.host_bytes


def fsdp_params(offloaded: OffloadedState) -> dict[str, Any]:
    """The engine's objects of all parameters that it has, trained or frozen."""
    return {**offloaded.engine, **offloaded.frozen.engine}


def offloaded_parameters(offloaded: OffloadedState) -> set[Tensor]:
    """The parameters whose values are not in the shards that the model has."""
    return (
        set()
        if offloaded.settings.is_device
        else {one.sharded_param for one in fsdp_params(offloaded).values()}
    )


def shards_for_loading(offloaded: OffloadedState) -> Iterator[set[Tensor]]:
    """As `OffloadedState.refill`, of the values alone, frozen ones too: they are the shards of the parameters
    that it yields as long as that lasts; moments become zero."""
    engine = fsdp_params(offloaded)
    for portion in offloaded.refill(frozen=True):
        own = {name: engine[name].sharded_param for name in portion}
        stands = {name: parameter._local_tensor for name, parameter in own.items()}
        for name, new in portion.items():
            own[name]._local_tensor = cast(DTensor, new["master"]).to_local()
            for key in new.keys() - {"master"}:
                cast(DTensor, new[key]).to_local().zero_()
        try:
            yield set(own.values())
        finally:
            for name, local in stands.items():
                own[name]._local_tensor = local


def _placed(one: Any, parts: Parts | None, *, moments: torch.dtype | None) -> dict[str, Tensor]:
    """As the engine's parameter `one` is. None: it has no row here."""
    if parts is None:
        dtype = str(one.sharded_param.dtype).removeprefix("torch.")
        parts = Parts(*(torch.empty(0, dtype=own) for own in dtypes_of(dtype, moments)))
    return {key: dtensor_like(one, part) for key, part in parts._asdict().items()}


def _now(of: "weakref.ref[OffloadedState]", name: str, *, part: int) -> Tensor:
    """This part of a parameter's state, read."""
    state = of()
    if state is None or not state.closing.alive:
        raise OffloadError(
            f"the state of {name} is no longer on its drive.",
            why="the model that it was of is let go, and each tensor of a state_dict is read when it is used",
            fix="copy.deepcopy(optimizer.state_dict()) while the model is there, or a checkpoint",
        )
    state.updates.settle(to_load=True)
    found = state.store.read_parts(name)
    assert found is not None, "the rank has rows of it"
    return found[part].cpu()


def _settle(store: GroupStore, shards: GatherSource) -> None:
    store.settle()
    shards.settle()


class _Filling:
    """Puts values into a new store, in the order of its groups; moments are zero."""

    def __init__(self, stream: Iterator[tuple[Group, Parts]], publish: Update) -> None:
        self._stream, self._publish = stream, publish
        self._current = next(stream, None)
        self._at = 0

    def offer(self, values: Mapping[str, Tensor]) -> None:
        while self._current is not None:
            group, parts = self._current
            segment = group.segments[self._at]
            if segment.name not in values:
                return
            part = values[segment.name][segment.begin : segment.end]
            parts.master[segment.offset : segment.offset + segment.numel].copy_(part)
            self._at += 1
            if self._at == len(group.segments):
                self._publish(group, parts)
                self._current, self._at = next(self._stream, None), 0

    def end(self) -> None:
        assert self._current is None, "every unit was offered, in the order of use"


def _copy(new: Parts | None, parts: Parts, *, segment: Segment) -> None:
    assert new is not None, "the rank has rows of it"
    for source, target in zip(new, parts, strict=True):
        own = source[segment.begin : segment.end]
        into = target[segment.offset : segment.offset + segment.numel]
        if own.data_ptr() != into.data_ptr():
            into.copy_(own)


def _flat(parameter: nn.Parameter) -> Tensor:
    return cast(DTensor, parameter.detach()).to_local().reshape(-1)


_ATTRIBUTE = "_fullshard_offloaded"  # of the model


def attach(model: nn.Module, state: OffloadedState) -> None:
    """Makes `offloaded_of` find `state` by its model."""
    setattr(model, _ATTRIBUTE, state)


def offloaded_of(model: nn.Module) -> OffloadedState | None:
    """Returns the offloaded state of a model, or None if nothing of it is offloaded."""
    return getattr(model, _ATTRIBUTE, None)
