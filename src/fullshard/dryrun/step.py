"""Two steps of a sharded model in the current process, on fake ranks and fake tensors."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.dryrun.allocator import AllocatorPeak, simulate_allocator
from fullshard.dryrun.events import compute_peak_moment
from fullshard.dryrun.ranks import disable_collectives, fake_process_group, use_lazy_chunks
from fullshard.dryrun.recorder import StorageEventRecorder
from fullshard.dryrun.values import DryRunMemory
from fullshard.errors import ShardError
from fullshard.models.build import build_model
from fullshard.models.model_parallel import divide_model
from fullshard.sharding.apply import apply_recompute_and_fsdp, finish_sharding, prepare_sharding
from fullshard.sharding.materialize import allocate_fake_shards_and_buffers
from fullshard.sharding.mesh import build_axis_group
from fullshard.sharding.units import Predicate
from fullshard.spec.plan import Plan
from fullshard.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from fullshard.tracing.cuda_kernels import emulate_cuda_kernels
from fullshard.tracing.example_batch import disable_packing_detection
from fullshard.tracing.trace import LossFunction

MakeOptimizer = Callable[[nn.Module, Plan], Optimizer]
MakeBatch = Callable[[Plan], Any]

OPTIMIZER_STEP = "optimizer step"


def build_run_model(plan: Plan) -> nn.Module:
    """Builds the model of the plan's run."""
    return build_model(plan.run)


def token_batch(plan: Plan) -> dict[str, Tensor]:
    """Returns int64 `tokens` and `labels`, each (microbatch, sequence_length)."""
    shape = (plan.microbatch, plan.run.data.sequence_length)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}


def run_dry_step(
    model: nn.Module,
    plan: Plan,
    *,
    loss: LossFunction,
    optimizer: MakeOptimizer,
    batch: MakeBatch = token_batch,
    units: Predicate | None = None,
    rank: int = 0,
) -> DryRunMemory:
    """Shards `model` by `plan`, runs two steps on fake tensors, and returns the memory of the second.

    The model cannot be used afterwards. The code is that of training, not compiled. For a CUDA plan,
    operations follow CUDA's code paths (`tracing.cuda_kernels`).

    loss: `loss(model, microbatch)`
    optimizer: `optimizer(model, plan)`
    batch: `batch(plan)`, returns one microbatch
    units: as in `shard`
    rank: the rank that this process simulates

    Raises ShardError if this process already has a process group, or the model cannot be sharded. An error
    within backward may end the process; `fullshard.dryrun.process.dry_run` guards against that.
    """
    recorder = StorageEventRecorder(plan.device)
    plan = _uncompiled_cpu_plan(plan)
    with fake_process_group(plan.world_size, rank=rank), _patch_torch_for_dry_run(recorder):
        with use_lazy_chunks():
            split = divide_model(
                model, plan, rank=rank, group_name=lambda axis: build_axis_group(plan, axis).group_name
            )
            prepared = prepare_sharding(model, plan, units=units, stands_for=recorder.device, split=split)
            apply_recompute_and_fsdp(model, prepared)
        disable_collectives(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate_fake_shards_and_buffers(model, prepared.units)
            finish_sharding(model, prepared)
            recorder.track_and_get_blocks([*model.parameters(), *model.buffers()])
            with recorder:
                built = optimizer(model, plan)
                gradients: set[int] = set()
                built.register_step_pre_hook(lambda *_: gradients.update(_gradient_blocks(model, recorder)))
                start = 0
                for _ in range(2):
                    start = len(recorder.events)
                    _run_fake_step(model, plan, optimizer=built, loss=loss, batch=batch, recorder=recorder)
            return _build_dry_run_result(model, built, recorder=recorder, gradients=gradients, start=start)


def _run_fake_step(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: Optimizer,
    loss: LossFunction,
    batch: MakeBatch,
    recorder: StorageEventRecorder,
) -> None:
    """Runs one step with the same calls to FSDP2, in the same order, as `training.step`.

    The gradient norm is left out. It takes one scalar per gradient.
    """
    sums = torch.zeros(4, dtype=torch.float64)  # ranks add up: loss, count, squared norm, stop
    for index in range(plan.accumulation):
        recorder.start_phase(f"microbatch {index + 1}")
        if isinstance(model, FSDPModule) and plan.accumulation > 1:
            _set_gradient_sync(model, plan, last=index == plan.accumulation - 1)
        given = cut_sequences(batch(plan), plan)  # kept until the next batch is created, as in training
        value = loss(model, given)
        total = value[0] if isinstance(value, tuple) else value
        (total * 1.0).backward()
        sums[0] += total.detach()
    recorder.start_phase(OPTIMIZER_STEP)
    optimizer.step()
    model.zero_grad(set_to_none=True)


def _set_gradient_sync(model: FSDPModule, plan: Plan, *, last: bool) -> None:
    model.set_requires_gradient_sync(last or plan.sync_each_microbatch)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.reshard_after_forward is not False)


@contextmanager
def _patch_torch_for_dry_run(recorder: StorageEventRecorder) -> Generator[None]:
    """Activates the torch modes of a dry run. Backward runs on this thread, since modes are per thread."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(recorder.record_resizes_and_random_states())
        stack.enter_context(disable_packing_detection())
        if recorder.device == "cuda":
            stack.enter_context(emulate_cuda_kernels())
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ShardError(
                "the model cannot be run dry.",
                got=f"{error.func}, whose result depends on values",
                why="fake tensors have shapes, and no values",
                fix="a step on real ranks, measured: fullshard train with a small run.ranks",
            ) from error


def _uncompiled_cpu_plan(plan: Plan) -> Plan:
    place = plan.run.run.model_copy(update={"compile": False})
    return plan.model_copy(update={"device": "cpu", "run": plan.run.model_copy(update={"run": place})})


def _gradient_blocks(model: nn.Module, recorder: StorageEventRecorder) -> set[int]:
    return recorder.track_and_get_blocks(p.grad for p in model.parameters() if p.grad is not None)


def _build_dry_run_result(
    model: nn.Module, optimizer: Optimizer, *, recorder: StorageEventRecorder, gradients: set[int], start: int
) -> DryRunMemory:
    """Returns the peak from the event `start` on, with the bytes alive at that moment split by owner."""
    peak = compute_peak_moment(recorder.events, start=start)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    parts = {
        "parameter_shards": recorder.track_and_get_blocks(model.parameters()),
        "gradients": gradients,
        "optimizer_state": recorder.track_and_get_blocks(state),
        "buffers": recorder.track_and_get_blocks(model.buffers()),
        "units_in_flight": recorder.fsdp_blocks,
    }
    left = dict(peak.live)
    sizes = {name: sum(left.pop(block, 0) for block in blocks) for name, blocks in parts.items()}
    steps = [after for after, name in recorder.moments if name == OPTIMIZER_STEP]
    held = simulate_allocator(recorder.events) if recorder.device == "cuda" else AllocatorPeak(0, 0)
    return DryRunMemory(
        moment=[name for after, name in recorder.moments if after < peak.event_count][-1],
        **sizes,
        rest=sum(left.values()),
        optimizer_step_bytes=compute_peak_moment(recorder.events, start=steps[-1]).live_bytes,
        allocated_bytes=held.allocated,
        reserved_bytes=held.reserved,
    )
