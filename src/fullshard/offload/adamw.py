"""AdamW whose state is in host memory or on a drive, and is updated group by group; and its gradients.

[Note: two buffers] With an update in device memory, each group is copied in and out in pieces. Each piece is
copied into one of two buffers, updated there, and copied back. On a GPU, each of these three operations has
its own stream, so that one piece is copied in while the previous piece is updated and copied out. A buffer is
refilled only after its content was copied out. All pieces of a group are enqueued at once, and the host waits
at the end of the group. The group's state is then complete in host memory, and may be written to the drive.

Host memory is registered with the GPU; otherwise each copy would block. A segment may be split over pieces. A
piece begins at a multiple of CUT_ELEMENTS of its group, and segments begin at full vectors, so that on a CPU
the results equal those of an update of the whole group.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.host import allocate_host_memory
from fullshard.distributed.tensors import local_tensor
from fullshard.errors import OffloadError
from fullshard.offload import rounding
from fullshard.offload.gather_source import ShardCopies, dtensor_like, master_dtype
from fullshard.offload.state import OffloadedState
from fullshard.offload.store import MasterAndMoments, master_and_moment_dtypes
from fullshard.spec.groups import OffloadGroup, ShardSegment, copy_chunk_elements
from fullshard.torch_private.fsdp import shard_shape
from fullshard.torch_private.tensors import foreach_norm, fused_adamw

_BUFFERS = 2


class GroupPieceOnDevice(NamedTuple):
    """A piece of a group in device memory, as a group of its own. `gradient` is laid out like each part."""

    group: OffloadGroup
    state: MasterAndMoments
    gradient: Tensor


class WorkStream:
    """Stream of device work: enqueued functions issue work, which runs in order. The host need not wait.

    Any thread may add functions. Without CUDA, `enqueue` runs the function before it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enqueue(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        """Enqueues `act`, to run after the events `after` of other streams. Returns the event of its end."""
        if self._stream is None:
            act()
            return None
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):  # which also sets the current device
            act()
            return self._stream.record_event()

    def make_memory_usable_in_stream(self, memory: Tensor) -> None:
        """Makes memory that was just allocated safe for use by the functions of this stream."""
        if self._stream is not None:
            # Work enqueued earlier on the current stream may still use this memory, so this stream waits.
            # When the memory is freed, the allocator must not reuse it before this stream is done with it.
            self._stream.wait_stream(torch.cuda.current_stream(memory.device))
            memory.record_stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class DeviceUpdateStreams(NamedTuple):
    """The streams that copy pieces to the device, update them, and copy them back."""

    into: WorkStream
    change: WorkStream
    out: WorkStream


class DeviceUpdater:
    """Updates `groups` through buffers in the memory of `device`: see [Note: two buffers].

    moments: dtype of the moments; None for the masters' dtype
    streams: by default three CUDA streams; without CUDA, the calling thread does all work
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        *,
        device: torch.device,
        moments: torch.dtype | None,
        streams: DeviceUpdateStreams | None = None,
    ) -> None:
        self._elements, self._moments = copy_chunk_elements(groups), moments
        self._streams = streams or DeviceUpdateStreams(*(WorkStream(device) for _ in range(3)))
        sizes = [
            sum(dtype.itemsize for dtype in _state_and_gradient_dtypes(group, moments)) for group in groups
        ]
        size = max(sizes, default=0) * self._elements
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        for stream in self._streams:
            for buffer in self.buffers:
                stream.make_memory_usable_in_stream(buffer)

    def update_group(
        self,
        group: OffloadGroup,
        parts: MasterAndMoments,
        *,
        gradients: Mapping[str, Tensor],
        change: Callable[[GroupPieceOnDevice], None],
    ) -> None:
        """Calls `change` on each piece that has a gradient, and returns when the results are in `parts`.

        parts: the group's state, in host memory
        gradients: flat gradients of this rank's shards by parameter, in host memory, in the masters' dtype
        change: updates a piece in place, except its segments without a gradient
        """
        streams, free = self._streams, [list[Any]() for _ in self.buffers]
        dtypes = _state_and_gradient_dtypes(group, self._moments)
        try:
            every = iterate_group_pieces(group, self._elements)
            changing = (one for one in every if any(name in gradients for name in one[1].names))
            for turn, (begin, piece) in enumerate(changing):
                at = turn % _BUFFERS
                *state, gradient = self._part_views(self.buffers[at], dtypes, numel=piece.numel_with_gaps)
                here = GroupPieceOnDevice(piece, MasterAndMoments(*state), gradient)
                there = [part[begin : begin + piece.numel_with_gaps] for part in parts]
                come = partial(_copy_piece_to_device, there, here, gradients=gradients)
                arrived = streams.into.enqueue(come, after=free[at])
                changed = streams.change.enqueue(partial(change, here), after=[arrived])
                free[at] = [streams.out.enqueue(partial(_copy_tensors, state, there), after=[changed])]
        finally:
            for stream in streams:
                stream.synchronize()

    def _part_views(self, buffer: Tensor, dtypes: Sequence[torch.dtype], *, numel: int) -> Iterator[Tensor]:
        begin = 0
        for dtype in dtypes:
            yield buffer[begin : begin + numel * dtype.itemsize].view(dtype)
            begin += self._elements * dtype.itemsize


def iterate_group_pieces(group: OffloadGroup, elements: int) -> Iterator[tuple[int, OffloadGroup]]:
    """Yields (position in the group, piece) for each run of `elements` elements that contains a segment's."""
    for begin in range(0, group.numel_with_gaps, elements):
        segments = tuple(
            ShardSegment(one.name, one.begin + low - one.offset, one.begin + high - one.offset, low - begin)
            for one in group.segments
            if (low := max(begin, one.offset)) < (high := min(begin + elements, one.offset + one.numel))
        )
        if segments:
            yield begin, OffloadGroup(group.index, group.dtype, tuple(one.name for one in segments), segments)


def _copy_piece_to_device(
    parts: Sequence[Tensor], piece: GroupPieceOnDevice, *, gradients: Mapping[str, Tensor]
) -> None:
    _copy_tensors(parts, piece.state)
    for one in piece.group.segments:
        if (gradient := gradients.get(one.name)) is not None:
            piece.gradient[one.slice_in_group].copy_(gradient[one.slice_in_shard], non_blocking=True)


def _copy_tensors(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


def _state_and_gradient_dtypes(group: OffloadGroup, moments: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the three parts, and of the gradient, which has the master's."""
    state = master_and_moment_dtypes(group.dtype, moments)
    return *state, state[0]


class HostGradients:
    """Gradients in pinned host memory, in their masters' dtype, copied there when FSDP2 has reduced them.

    Copies run on a stream of their own. Gradients of further microbatches are added on the device, where the
    norms are computed too, so that the host need not read the gradients for them.

    engine: FSDP2's object of each parameter, by name
    """

    def __init__(self, engine: Mapping[str, Any]) -> None:
        sizes = [shard_shape(one).numel() * master_dtype(one).itemsize for one in engine.values()]
        *begins, total = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        memory = allocate_host_memory(total, pinned=True)
        self._engine, self._there, self._norms = engine, set[str](), dict[str, Tensor]()
        self._host = {
            name: memory[begin : begin + size].view(master_dtype(one))
            for (name, one), begin, size in zip(engine.items(), begins, sizes, strict=True)
        }
        self._stream = torch.cuda.Stream()
        for name, one in engine.items():
            # A weak reference, since the collector does not see these hooks, which would keep the model too.
            take = cast(Callable[[Tensor], None], partial(_move_gradient_if_used, weakref.ref(self), name))
            one.sharded_param.register_post_accumulate_grad_hook(take)

    def find_gradient(self, name: str) -> Tensor | None:
        """Returns a parameter's gradient, placed like the parameter, or None if it has no gradient.

        Its attribute `norm_on_device` is the L2 norm of this rank's part.
        """
        if name not in self._there:
            return None
        self._stream.synchronize()
        gradient: Any = dtensor_like(self._engine[name], self._host[name])
        gradient.norm_on_device = self._norms[name]
        return gradient

    def clear(self) -> None:
        """Removes all gradients. Their tensors stay unchanged, since an update may still use them."""
        self._there.clear()

    @torch.no_grad()
    def move_gradient_to_host(self, name: str, parameter: nn.Parameter) -> None:
        """Moves a gradient to host memory, or adds it there. FSDP2 calls this on the reducing stream."""
        assert isinstance(parameter.grad, DTensor), "the engine reduces sharded gradients"
        reduced, parameter.grad = parameter.grad.to_local(), None
        host, adds = self._host[name].view(reduced.shape), name in self._there
        self._there.add(name)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            total = host.to(reduced.device, non_blocking=True).add_(reduced) if adds else reduced
            host.copy_(total, non_blocking=True)
            (self._norms[name],) = foreach_norm([total], 2, dtype=torch.float32)
        # Nothing else holds it, and FSDP2 may reduce the next unit's gradients into its memory.
        reduced.record_stream(self._stream)


def _move_gradient_if_used(  # signature: bound arguments, and that of torch's hook
    gradients: "weakref.ref[HostGradients]", name: str, parameter: nn.Parameter
) -> None:
    if (own := gradients()) is not None:
        own.move_gradient_to_host(name, parameter)


@dataclass(frozen=True)
class _ParameterUpdateInputs:
    """Inputs for the update of one parameter: its flat gradient, step count, options, and rounding seed."""

    gradient: Tensor
    step: Tensor
    options: rounding.AdamOptions
    seed: int


_Jobs = Mapping[str, _ParameterUpdateInputs]  # by name of the parameter


class StreamingAdamW(torch.optim.Optimizer):
    """AdamW with offloaded state (arXiv:1711.05101); in fp32 bit for bit equal to torch's fused AdamW.

    Parameters that are not offloaded (scalars) are updated in place. `step` may return before the update has
    finished: each later all-gather waits for its own unit. bf16 masters and moments are rounded
    stochastically from `seed`; the random numbers depend on where groups (with `on_device`, pieces) begin.

    offloaded: the masters and moments
    gradients: the gradients of offloaded parameters; None if they stay in `parameter.grad`
    gradient_factor: the next `step` multiplies gradients by this factor (of clipping), and resets it to 1
    on_device: buffers for an update in the device's memory; if None, the host updates the state in place
    """

    def __init__(
        self,
        params: Iterable[Any],
        offloaded: OffloadedState,
        *,
        gradients: HostGradients | None,
        defaults: rounding.AdamOptions,
        seed: int = 0,
        on_device: DeviceUpdater | None = None,
    ) -> None:
        lr, *betas, eps, decay = defaults
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": decay})
        self.offloaded, self.gradients, self.seed, self.gradient_factor = offloaded, gradients, seed, 1.0
        self._on_device = on_device

    @property
    def optimizer_name_in_checkpoint(self) -> str:
        """Name of the optimizer class that resumes from this state without offload, for checkpoints."""
        masters = {p.dtype for p, *_ in self._parameters_and_options()}
        return "StochasticAdamW" if torch.bfloat16 in masters else "AdamW"

    @property
    def device_shard_copies(self) -> Iterable[Tensor]:
        """Copies of the shards in device memory; empty if the masters are there, or shards are offloaded."""
        shards = self.offloaded.shards
        return shards.tensors.values() if isinstance(shards, ShardCopies) and not shards.host_bytes else ()

    @property
    def device_buffers(self) -> Iterable[Tensor]:
        """Device buffers through which groups are updated; empty if the host updates them."""
        return self._on_device.buffers if self._on_device is not None else ()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        self.offloaded.wait_for_update()
        factor, self.gradient_factor = self.gradient_factor, 1.0
        names, jobs = self.offloaded.names_of, dict[str, _ParameterUpdateInputs]()
        for place, (parameter, group) in enumerate(self._parameters_and_options(), start=1):
            name = names.get(parameter)
            if (gradient := self.find_gradient(parameter)) is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            rate, (beta1, beta2) = float(group["lr"]), group["betas"]
            options = rounding.AdamOptions(rate, beta1, beta2, group["eps"], group["weight_decay"])
            seed = rounding.rounding_key(self.seed, parameter=place, shard=rounding.shard_index(parameter))
            job = _ParameterUpdateInputs(local_tensor(gradient).reshape(-1), state["step"], options, seed)
            if name is not None:
                jobs[name] = job
            else:
                self._update_not_offloaded(parameter, job, factor=factor)

        update = partial(_update_group, jobs, factor=factor)
        if self._on_device is not None:
            update = partial(_update_group_on_device, jobs, on_device=self._on_device, factor=factor)
        self.offloaded.start_update(update, release=lambda name: jobs.pop(name, None))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.gradients is not None:
            self.gradients.clear()

    def find_gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of a parameter of this optimizer, or None if it has no gradient."""
        name = self.offloaded.names_of.get(parameter)
        if name is None or self.gradients is None:
            return parameter.grad
        return self.gradients.find_gradient(name)

    def state_dict(self) -> dict[str, Any]:
        raise _no_state_dict_error("is not in a state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise _no_state_dict_error("cannot be loaded from a state_dict")

    def _parameters_and_options(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                yield parameter, group

    def _update_not_offloaded(self, parameter: Tensor, job: _ParameterUpdateInputs, *, factor: float) -> None:
        state = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter)
        own = MasterAndMoments(*(one.view(-1) for one in (parameter, state["exp_avg"], state["exp_avg_sq"])))
        if parameter.dtype is torch.bfloat16:
            _update_with_stochastic_rounding(job, job.gradient, state=own, begin=0, factor=factor)
        else:
            steps = [_step_count_on_device(job, parameter.device)]
            cut = [[one] for one in own]
            _run_fused_adamw(cut, [job.gradient], steps=steps, options=job.options, factor=factor)


def _update_group_on_device(  # signature: as `_update_group`
    jobs: _Jobs, group: OffloadGroup, parts: MasterAndMoments, *, on_device: DeviceUpdater, factor: float
) -> None:
    def update_piece(piece: GroupPieceOnDevice) -> None:
        _update_group(jobs, piece.group, piece.state, factor=factor, gradient=piece.gradient)

    own = {one.name: job.gradient for one in group.segments if (job := jobs.get(one.name)) is not None}
    on_device.update_group(group, parts, gradients=own, change=update_piece)


def _update_group(  # signature: bound arguments, and those of `state.Update`
    jobs: _Jobs,
    group: OffloadGroup,
    parts: MasterAndMoments,
    *,
    factor: float,
    gradient: Tensor | None = None,
) -> None:
    """Updates one group. `gradient` is laid out like each part; if None, each job's own gradient is used."""
    alike: dict[rounding.AdamOptions, list[tuple[_ParameterUpdateInputs, ShardSegment]]] = defaultdict(list)
    for segment in group.segments:
        job = jobs.get(segment.name)
        if job is not None:
            alike[job.options].append((job, segment))
    for options, own in alike.items():
        gradients = [
            job.gradient[one.slice_in_shard] if gradient is None else gradient[one.slice_in_group]
            for job, one in own
        ]
        cut = [[part[one.slice_in_group] for _, one in own] for part in parts]
        if parts.master.dtype is parts.exp_avg.dtype is torch.float32:
            steps = [_step_count_on_device(job, parts.master.device) for job, _ in own]
            _run_fused_adamw(cut, gradients, steps=steps, options=options, factor=factor)
            continue
        for (job, one), g, *state in zip(own, gradients, *cut, strict=True):
            _update_with_stochastic_rounding(
                job, g, state=MasterAndMoments(*state), begin=one.begin, factor=factor
            )


def _update_with_stochastic_rounding(
    job: _ParameterUpdateInputs, gradient: Tensor, *, state: MasterAndMoments, begin: int, factor: float
) -> None:
    step, seed = int(job.step.item()), rounding.RoundingSeed(job.seed, begin)
    factors = rounding.UpdateFactors.from_numbers(step, job.options, grad_scale=1 / factor)
    rounding.adamw_with_stochastic_rounding(state, gradient, factors=factors, seed=seed)


def _step_count_on_device(job: _ParameterUpdateInputs, device: torch.device) -> Tensor:
    """Returns the step count on `device` for the fused kernel. `torch.full` avoids a blocking copy."""
    if job.step.device == device:
        return job.step
    return torch.full((), job.step.item(), dtype=torch.float32, device=device)


def _run_fused_adamw(
    state: list[list[Tensor]],
    gradients: list[Tensor],
    *,
    steps: list[Tensor],
    options: rounding.AdamOptions,
    factor: float,
) -> None:
    """Runs torch's fused kernel. `state` lists the values, the first moments and the second moments.

    The kernel multiplies the gradients by `factor`, as a division by the same fp32 number by which an update
    without offload divides.
    """
    values, first, second = state
    scale = torch.full((), 1 / factor, dtype=torch.float32, device=gradients[0].device)
    fused_adamw(
        *(values, gradients, first, second, [], steps),
        **options._asdict(),
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )


def _no_state_dict_error(what: str) -> OffloadError:
    return OffloadError(
        f"offloaded optimizer state {what}.",
        why="it may take more memory than the host has",
        fix="fullshard.save and fullshard.load, for any number of ranks; or fullshard.full_state to read it",
    )
