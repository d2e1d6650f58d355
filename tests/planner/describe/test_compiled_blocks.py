"""Bytes that compiled blocks save, as traced on fake tensors, against what the compiler's own graphs save."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from fullshard.distributed.tensors import storage_key
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.parallel.recompute import apply_recompute
from fullshard.planner.describe.describe import describe
from fullshard.spec.model import MicrobatchTrace
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.architectures import on_meta

# The compiler's own, on some releases of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
SMALL = (
    *("model.layers=3", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.d_ff=160"),
    *("data.sequence_length=32", "train.microbatch=2", "train.global_batch=2", "precision.mode=fp32"),
)


def run_of(*settings: str) -> Run:
    return Run.load(overrides=[*SMALL, *settings])


def trace_of(run: Run, *, device: str = "cpu") -> MicrobatchTrace:
    plan = Plan.from_run(run, world_size=1, device="cuda" if device == "cuda" else "cpu")
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    return describe(model, plan, loss=next_token_loss, device_type=plan.device).trace_for_plan(plan)


def saved_per_block(trace: MicrobatchTrace) -> float:
    """Bytes by which each block's forward increases what is alive."""
    ends = [phase.end.activations.value_at(2) for phase in trace.phases if phase.event == "post_forward"]
    return ends[3] - ends[2]


def saved_by_compiler(run: Run) -> int:
    """Bytes that the last of three blocks saves, of its own, under torch.compile with its own partitioner."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DecoderModel(run.decoder_config.model_copy(update={"layers": 3}))
    apply_recompute(list(model.blocks), run.recompute, compiled=set(model.blocks))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=aot_eager_decomp_partition, fullgraph=True)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.uint8:  # the state of a random generator, which a GPU keeps on the host
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    x = model.embedding(torch.zeros(2, 32, dtype=torch.int64))
    rotary = model.positions(32, None, x.dtype)
    outside = [*model.parameters(), *model.buffers(), rotary]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks:
            saved.clear()
            x = x.detach().requires_grad_()
            kept.append(x)
            x = block(x, rotary)
    for tensor in [*outside, *kept, x]:
        saved.pop(storage_key(tensor), None)
    return sum(saved.values()) + x.untyped_storage().nbytes()  # the next block's input


@pytest.mark.parametrize(
    "mode", ["selective", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("none", "full"))]
)
def test_traced_block_saves_as_the_compiler_does(mode: str) -> None:
    run = run_of(f"recompute.mode={mode}", "run.compile=true")
    assert saved_per_block(trace_of(run)) == saved_by_compiler(run)


def test_automatic_compile_is_traced_eager_and_compiled_on_gpu_only() -> None:
    """And a compiled block saves and launches less than an eager one."""
    run = run_of("recompute.mode=none", "run.compile=auto", "precision.mode=bf16")
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    on_cpu, on_gpu = (
        describe(model, run, loss=next_token_loss, device_type=device).traces for device in ("cpu", "cuda")
    )
    assert not any(one.compiled for one in on_cpu)
    eager, compiled = (next(one for one in on_gpu if one.compiled == choice) for choice in (False, True))
    assert saved_per_block(compiled) < saved_per_block(eager)
    launches = [sum(one.times for phase in trace.phases for one in phase.work) for trace in (eager, compiled)]
    assert launches[1] < launches[0]


class Unscripted(nn.Module):
    """A block that no graph can hold: its backward is one that the compiler's tracing refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None:
            raise NotImplementedError("no graph")
        return torch.tanh(self.linear(x))


def test_a_block_that_is_no_graph_is_traced_as_eager() -> None:
    model = nn.Sequential(*(Unscripted() for _ in range(6)))
    batch = {"x": torch.empty(2, 16, device="meta")}
    traces = []
    for choice in ("false", "true"):
        run = Run.load(overrides=[*SMALL[5:], f"run.compile={choice}", "recompute.mode=full"])
        plan = Plan.from_run(run, world_size=1, device="cuda")
        spec = describe(model, plan, loss=lambda net, x: net(x["x"]).sum(), batch=batch, device_type="cuda")
        traces.append(spec.trace_for_plan(plan))
    assert traces[0].phases == traces[1].phases


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.long), "selective"])
def test_blocks_that_gather_inside_are_traced_as_pieces(mode: str) -> None:
    run = Run.load(overrides=["train.global_batch=3", "precision.mode=fp32", f"recompute.mode={mode}"])
    spec = describe(
        on_meta("fused_experts"),
        run.model_copy(update={"run": run.run.model_copy(update={"compile": True})}),
        loss=lambda model, batch: model(batch["tokens"]).float().square().mean(),
        batch={"tokens": torch.empty(3, 9, dtype=torch.int64, device="meta")},
        device_type="cpu",
    )
    assert [(trace.recompute.mode, trace.compiled) for trace in spec.traces] == [(mode, True)]
