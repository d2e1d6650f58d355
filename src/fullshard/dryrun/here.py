"""Dry run in the current process."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from fullshard.dryrun.allocator import LiveBlock, simulate
from fullshard.dryrun.decoder import token_batch
from fullshard.dryrun.events import highest
from fullshard.dryrun.ranks import disable_collectives, fake_ranks, lazy_chunks
from fullshard.dryrun.recorder import Recorder
from fullshard.dryrun.result import DryRun
from fullshard.dryrun.step import OPTIMIZER_STEP, Loss, MakeBatch, MakeOptimizer, dry_step
from fullshard.errors import ShardError
from fullshard.sharding.apply import apply_fully_shard, finish_sharding, prepare
from fullshard.sharding.materialize import allocate_fake
from fullshard.sharding.units import Predicate
from fullshard.spec.plan import Plan
from fullshard.tracing.cuda_kernels import cuda_kernels


def run_dry_step(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    optimizer: MakeOptimizer,
    batch: MakeBatch = token_batch,
    units: Predicate | None = None,
    rank: int = 0,
) -> DryRun:
    """Shards `model` by `plan` and runs two steps on fake tensors. The model cannot be used afterwards.

    The code is the same as in training: `fully_shard`, forward, backward, reduction, optimizer. The tensors
    are fake (shapes without data) and the process group has no other ranks. For a CUDA plan, the operations
    follow CUDA's code paths (`tracing.cuda_kernels`). Nothing is compiled.

    loss: `loss(model, microbatch)`.
    optimizer: `optimizer(model, plan)`.
    batch: `batch(plan)`, returns one microbatch.
    units: as in `shard`.
    rank: the rank that this process stands for.

    Raises ShardError if this process already has a process group, or the model cannot be sharded. An error
    within backward may end the process; `fullshard.dryrun.run.dry_run` guards against that.
    """
    recorder = Recorder(plan.device)
    plan = _on_cpu(plan)
    with fake_ranks(plan.world_size, rank=rank), _eager_modes(recorder):
        with lazy_chunks():
            prepared = prepare(model, plan, units=units)
            apply_fully_shard(model, prepared, plan=plan, stands_for=recorder.device)
        disable_collectives(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate_fake(model, prepared.units)
            finish_sharding(model, prepared.units, plan=plan)
            recorder.note([*model.parameters(), *model.buffers()])
            with recorder:
                built = optimizer(model, plan)
                gradients: set[int] = set()
                built.register_step_pre_hook(lambda *_: gradients.update(_gradients(model, recorder)))
                starts: list[int] = []
                for _ in range(2):
                    starts.append(len(recorder.events))
                    dry_step(model, plan, optimizer=built, loss=loss, batch=batch, recorder=recorder)
            return _result(model, built, recorder=recorder, gradients=gradients, start=starts[-1])


@contextmanager
def _eager_modes(recorder: Recorder) -> Generator[None]:
    """Activates the modes of a dry run on this thread. Autograd's own threads would have none of them."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(recorder.record_all())
        if recorder.device == "cuda":
            stack.enter_context(cuda_kernels())
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ShardError(
                "the model cannot be run dry.",
                got=f"{error.func}, whose result depends on values",
                why="fake tensors have shapes, and no values",
                fix="a step on real ranks, measured: fullshard train with a small run.ranks",
            ) from error


def _on_cpu(plan: Plan) -> Plan:
    place = plan.run.run.model_copy(update={"compile": False})
    return plan.model_copy(update={"device": "cpu", "run": plan.run.model_copy(update={"run": place})})


def _gradients(model: nn.Module, recorder: Recorder) -> set[int]:
    return recorder.note(p.grad for p in model.parameters() if p.grad is not None)


def _result(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, recorder: Recorder, gradients: set[int], start: int
) -> DryRun:
    """Returns the peak of the events from `start` on, split by owner of the blocks alive at that moment."""
    peak = highest(recorder.events, start=start)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    parts = {
        "parameter_shards": recorder.note(model.parameters()),
        "gradients": gradients,
        "optimizer_state": recorder.note(state),
        "buffers": recorder.note(model.buffers()),
        "units_in_flight": recorder.engine,
    }
    sizes: dict[str, int] = {}
    left = dict(peak.live)
    for name, blocks in parts.items():
        sizes[name] = _taken(left, blocks)
    steps = [after for after, name in recorder.moments if name == OPTIMIZER_STEP]
    held = simulate(recorder.events) if recorder.device == "cuda" else LiveBlock(0, 0)
    return DryRun(
        moment=[name for after, name in recorder.moments if after < peak.after][-1],
        **sizes,
        rest=sum(left.values()),
        optimizer_step_bytes=highest(recorder.events, start=steps[-1]).bytes,
        allocated_bytes=held.allocated,
        reserved_bytes=held.reserved,
    )


def _taken(live: dict[int, int], blocks: Iterable[int]) -> int:
    """Removes `blocks` from `live`; returns their bytes."""
    return sum(live.pop(block, 0) for block in blocks)
