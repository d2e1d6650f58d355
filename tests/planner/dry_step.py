"""A step of training on fake ranks and fake tensors: the bytes that one rank holds, counted by operation.

The code is that of training. Tests compare it with real ranks on the CPU, and the planner with it where there
are no real ranks: 64 of them, and CUDA, whose kernels are emulated (`describe.emulation`).
"""

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg as fake_pg  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.distributed.tensors import (
    dtensor_from_local_part,
    is_tensor_wrapper_subclass,
    local_tensor,
    storage_key,
    tensors_with_data,
)
from fullshard.models.loss import next_token_loss
from fullshard.parallel.apply import apply_recompute_and_fsdp_on_meta, choose_sharding
from fullshard.parallel.fp8 import set_up_fp8_gathers
from fullshard.parallel.mesh import build_axis_group, forget_groups
from fullshard.parallel.model_parallel import divide_model_and_return_split_dims
from fullshard.parallel.model_parameters import replace_by_id
from fullshard.planner.describe.emulation import emulate_cuda_kernels
from fullshard.planner.describe.operations import OpCall, run_on_fake_tensors, transient_kernel_bytes
from fullshard.planner.describe.trace import disable_packing_detection
from fullshard.spec.plan import DeviceType, Plan
from fullshard.torch_private.tensors import storage_id, tree_leaves
from fullshard.training.optimizer import build_optimizer


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages while active, those that an operation returns or resizes.

    A weak reference reports a release. Of the memory within an operation, only the largest parts are known.

    device: whose kernels the operations stand for
    peak: the most live bytes so far
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self.device: DeviceType = device
        self.live, self.peak = 0, 0
        self._sizes: dict[int, int] = {}  # storage -> its bytes
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1 if args[0].dtype is torch.bool else args[0].dtype.is_floating_point * 0.0 + 1
        if any(map(is_tensor_wrapper_subclass, types)):
            return NotImplemented  # the subclass calls operations on the tensors that it holds
        call = OpCall(func, args, kwargs or {})
        result = run_on_fake_tensors(call)
        self.track(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        within = transient_kernel_bytes(call, device=self.device)
        within += padding_bytes(func, args, kwargs or {}) if self.device == "cpu" else 0
        self._add(within)
        self.live -= within
        return result

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of `tensors` from now on."""
        with torch.no_grad():
            for part in [part for tensor in tensors for part in tensors_with_data(tensor)]:
                storage, key = part.untyped_storage(), storage_key(part)
                if part.device.type != "meta" and key not in self._watched:
                    self._watched[key] = weakref.ref(storage, lambda _, key=key: self._release(key))
                    self._resize(key, storage.nbytes())

    @contextmanager
    def watch_resizes_and_random_states(self) -> Generator[None]:
        """Counts what is no operation too: FSDP2 resizes storages, recompute saves random states."""
        resize, random_state = torch.UntypedStorage.resize_, torch.get_rng_state

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result, key = resize(storage, size), storage_id(storage)
            if key in self._watched:
                self._resize(key, storage.nbytes())
            return result

        def get_random_state_and_count() -> Tensor:
            state = random_state()
            self.track([state] if self.device == "cpu" else [])
            return state

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign]
        torch.get_rng_state = get_random_state_and_count
        try:
            yield
        finally:
            torch.UntypedStorage.resize_, torch.get_rng_state = resize, random_state

    def _resize(self, key: int, size: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._sizes[key] = size
        self._add(size)

    def _release(self, key: int) -> None:
        del self._watched[key]
        self.live -= self._sizes.pop(key)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def padding_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The bytes that the CPU's `chunk_cat` allocates to pad gradients with uneven rows."""
    if func.name() != "fsdp::chunk_cat":
        return 0
    named = dict(zip(("tensors", "dim", "num_chunks"), args, strict=False)) | kwargs
    dim, count = named["dim"], named["num_chunks"]
    uneven = [tensor for tensor in named["tensors"] if tensor.size(dim) % count]
    return sum(t.nbytes // t.size(dim) * -(-t.size(dim) // count) * count for t in uneven)


class SilentCollective:
    """Allocates what FSDP2's collectives do, and transfers nothing. Gloo's would send to all ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> None:
        return None


def dry_peak_bytes(model: nn.Module, plan: Plan) -> int:
    """Returns the peak bytes of rank 0 in a step after the one that made the optimizer's state."""
    count = LiveBytes(plan.device)
    run = plan.run.run.model_copy(update={"compile": False})
    plan = plan.model_copy(update={"device": "cpu", "run": plan.run.model_copy(update={"run": run})})
    with fake_ranks(plan.world_size), ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes are per thread
        stack.enter_context(count.watch_resizes_and_random_states())
        stack.enter_context(disable_packing_detection())
        if count.device == "cuda":
            stack.enter_context(emulate_cuda_kernels())
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        shard_dry(model, plan, device=count.device, fakes=fakes)
        with fakes:
            count.track([*model.parameters(), *model.buffers()])
            with count:
                optimizer = build_optimizer(model, plan)
                for _ in range(2):
                    count.peak = count.live
                    run_step(model, plan, optimizer=optimizer)
    return count.peak


@contextmanager
def fake_ranks(world_size: int) -> Generator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


def shard_dry(model: nn.Module, plan: Plan, *, device: DeviceType, fakes: FakeTensorMode) -> None:
    split = divide_model_and_return_split_dims(
        model, plan, rank=0, group_name=lambda axis: build_axis_group(plan, axis).group_name
    )
    prepared = replace(choose_sharding(model, plan, split=split), device=device)
    apply_recompute_and_fsdp_on_meta(model, prepared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SilentCollective())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(SilentCollective())  # type: ignore[arg-type]
    with fakes:
        for old in model.parameters():
            local = torch.empty(local_tensor(old).shape, dtype=old.dtype)
            data = dtensor_from_local_part(old, local) if isinstance(old, DTensor) else local
            torch.utils.swap_tensors(old, nn.Parameter(data, requires_grad=old.requires_grad))
        replace_by_id(model, {id(b): torch.empty_like(b, device="cpu") for b in model.buffers()})
        if prepared.fp8 is not None:
            set_up_fp8_gathers(model, prepared.fp8, device=prepared.device, methods=prepared.methods)


def run_step(model: nn.Module, plan: Plan, *, optimizer: torch.optim.Optimizer) -> None:
    """The calls to FSDP2 of `training.step`, in their order, without the norm of gradients."""
    sums = torch.zeros(4, dtype=torch.float64)
    shape = (plan.microbatch, plan.run.data.sequence_length)
    for index in range(plan.accumulation):
        last = index == plan.accumulation - 1
        if isinstance(model, FSDPModule) and plan.accumulation > 1:
            model.set_requires_gradient_sync(last or plan.sync_each_microbatch)
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or plan.reshard_after_forward)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
        batch = cut_sequences(batch, plan)  # kept until the next one is made, as in training
        total, _ = next_token_loss(model, batch)
        (total * 1.0).backward()
        sums[0] += total.detach()
    optimizer.step()
    model.zero_grad(set_to_none=True)
