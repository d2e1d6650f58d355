"""AdamW whose state is in host memory or on a drive, and is updated group by group; and its gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import local_tensor
from fullshard.errors import OffloadError
from fullshard.offload.device_update import DeviceUpdate, GroupPieceOnDevice
from fullshard.offload.gather_source import ShardCopies, dtensor_like, master_dtype
from fullshard.offload.rounding import (
    AdamOptions,
    RoundingSeed,
    adamw_with_stochastic_rounding,
    rounding_key,
    shard_index,
)
from fullshard.offload.state import OffloadedState
from fullshard.offload.store import MasterAndMoments, allocate_host_memory
from fullshard.spec.groups import OffloadGroup, ShardSegment
from fullshard.torch_private.fsdp import shard_shape
from fullshard.torch_private.tensors import foreach_multiply, fused_adamw


class GradientStore(Protocol):
    """The gradients of sharded parameters, by name."""

    def find_gradient(self, name: str) -> Tensor | None:
        """Returns a parameter's gradient, placed like the parameter, or None if it has no gradient."""
        ...

    def clear(self) -> None:
        """Removes all gradients. Their tensors stay unchanged, since an update may still use them."""
        ...


class DeviceGradients:
    """Gradients that stay in `parameter.grad`, where FSDP2 puts them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def find_gradient(self, name: str) -> Tensor | None:
        return self._parameters[name].grad

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class HostGradients:
    """Gradients in host memory, in their masters' dtype, copied there as soon as FSDP2 has reduced them.

    Gradients of further microbatches are added on the device.

    engine: FSDP2's object of each parameter, by name
    pinned: registers the host memory with CUDA, and copies on a stream of its own
    """

    def __init__(self, engine: Mapping[str, Any], *, pinned: bool) -> None:
        sizes = [shard_shape(one).numel() * master_dtype(one).itemsize for one in engine.values()]
        *begins, total = accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
        memory = allocate_host_memory(total, pinned=pinned)
        self._engine, self._there = engine, set[str]()
        self._host = {
            name: memory[begin : begin + size].view(master_dtype(one))
            for (name, one), begin, size in zip(engine.items(), begins, sizes, strict=True)
        }
        self._stream = torch.cuda.Stream() if pinned else None
        for name, one in engine.items():
            take = cast(Callable[[Tensor], None], partial(self._move_gradient_to_host, name))
            one.sharded_param.register_post_accumulate_grad_hook(take)

    def find_gradient(self, name: str) -> Tensor | None:
        if name not in self._there:
            return None
        if self._stream is not None:
            self._stream.synchronize()
        return dtensor_like(self._engine[name], self._host[name])

    def clear(self) -> None:
        self._there.clear()

    @torch.no_grad()
    def _move_gradient_to_host(self, name: str, parameter: nn.Parameter) -> None:
        """Moves a gradient to host memory, or adds it there. FSDP2 calls this on the reducing stream."""
        assert isinstance(parameter.grad, DTensor), "the engine reduces sharded gradients"
        gradient, parameter.grad = parameter.grad.to_local(), None
        host, adds = self._host[name].view(gradient.shape), name in self._there
        self._there.add(name)
        if self._stream is None:
            host.add_(gradient) if adds else host.copy_(gradient)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if adds:
                gradient = host.to(gradient.device, non_blocking=True).add_(gradient)
            host.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)


@dataclass(frozen=True)
class _UpdateInputs:
    """Inputs for the update of one parameter: its flat gradient, step count, options, and rounding seed."""

    gradient: Tensor
    step: Tensor
    options: AdamOptions
    seed: int


_Jobs = Mapping[str, _UpdateInputs]  # by name of the parameter


class StreamingAdamW(torch.optim.Optimizer):
    """AdamW with offloaded state (arXiv:1711.05101); in fp32 bit for bit equal to torch's fused AdamW.

    Parameters that are not offloaded (scalars) are updated in place. `step` may return before the update has
    finished: each later all-gather waits for its own unit. bf16 masters and moments are rounded
    stochastically from `seed`; the random numbers depend on where groups (with `on_device`, pieces) begin.

    offloaded: the masters and moments
    gradients: the gradients that `step` applies
    gradient_factor: the next `step` multiplies gradients by this factor (of clipping), and resets it to 1
    on_device: buffers for an update in the device's memory; if None, the host updates the state in place
    """

    def __init__(
        self,
        params: Iterable[Any],
        offloaded: OffloadedState,
        *,
        gradients: GradientStore,
        defaults: AdamOptions,
        seed: int = 0,
        on_device: DeviceUpdate | None = None,
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
        self.wait_for_update()
        factor, self.gradient_factor = self.gradient_factor, 1.0
        names, jobs = self.offloaded.names_of, dict[str, _UpdateInputs]()
        for place, (parameter, group) in enumerate(self._parameters_and_options(), start=1):
            name = names.get(parameter)
            gradient = parameter.grad if name is None else self.gradients.find_gradient(name)
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            options = AdamOptions(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            step, shard = int(state["step"].item()), shard_index(parameter)
            seed = rounding_key(self.seed, step=step, parameter=place, shard=shard)
            job = _UpdateInputs(local_tensor(gradient).reshape(-1), state["step"], options, seed)
            if name is not None:
                jobs[name] = job
            else:
                self._update_not_offloaded(parameter, job, factor=factor)

        update = partial(_update_group, jobs, factor=factor)
        if self._on_device is not None:
            update = partial(_update_group_on_device, jobs, on_device=self._on_device, factor=factor)
        self.offloaded.start_update(update, release=lambda name: jobs.pop(name, None))
        return loss

    def wait_for_update(self) -> None:
        """Waits until the last update has finished. Raises the error of a failed update."""
        self.offloaded.wait_for_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.gradients.clear()

    def state_dict(self) -> dict[str, Any]:
        raise _no_state_dict_error("is not in a state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise _no_state_dict_error("cannot be loaded from a state_dict")

    def _parameters_and_options(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                yield parameter, group

    def _update_not_offloaded(self, parameter: Tensor, job: _UpdateInputs, *, factor: float) -> None:
        state = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter)
        own = MasterAndMoments(*(one.view(-1) for one in (parameter, state["exp_avg"], state["exp_avg_sq"])))
        if parameter.dtype is torch.bfloat16:
            _update_and_round(job, job.gradient, state=own, begin=0, factor=factor)
        else:
            steps = [_step_count_on_device(job, parameter.device)]
            cut = [[one] for one in own]
            _run_fused_adamw(cut, [job.gradient], steps=steps, options=job.options, factor=factor)


def _update_group_on_device(  # signature: as `_update_group`
    jobs: _Jobs, group: OffloadGroup, parts: MasterAndMoments, *, on_device: DeviceUpdate, factor: float
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
    alike: dict[AdamOptions, list[tuple[_UpdateInputs, ShardSegment]]] = defaultdict(list)
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
            _update_and_round(job, g, state=MasterAndMoments(*state), begin=one.begin, factor=factor)


def _update_and_round(
    job: _UpdateInputs, gradient: Tensor, *, state: MasterAndMoments, begin: int, factor: float
) -> None:
    """Updates elements `begin` and following of a shard of which something is kept in bf16."""
    if factor != 1.0:  # not `mul_`, which rounds the factor to bf16
        foreach_multiply([gradient], factor)
    step, seed = int(job.step.item()), RoundingSeed(job.seed, begin)
    adamw_with_stochastic_rounding(state, gradient, step=step, options=job.options, seed=seed)


def _step_count_on_device(job: _UpdateInputs, device: torch.device) -> Tensor:
    """Returns the step count on `device` for the fused kernel. `torch.full` avoids a blocking copy."""
    if job.step.device == device:
        return job.step
    return torch.full((), job.step.item(), dtype=torch.float32, device=device)


def _run_fused_adamw(
    state: list[list[Tensor]],
    gradients: list[Tensor],
    *,
    steps: list[Tensor],
    options: AdamOptions,
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
