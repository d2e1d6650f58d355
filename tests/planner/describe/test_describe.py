"""The spec says what the CPU allocator counts, without ever allocating a weight."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import ShardError, TraceError
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss, next_token_loss
from fullshard.observe.memory import measure_peak_memory
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.parallel.recompute import apply_activation_offload, apply_recompute
from fullshard.parallel.units import find_recompute_and_compile_blocks, find_units
from fullshard.planner.describe.describe import describe
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.memory import peak_bytes
from fullshard.spec.model import LiveTensorBytes, MicrobatchTrace, ModelSpec, TracePhase
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import RecomputeSection
from tests.fakes.architectures import LENGTH, loss_of, on_meta
from tests.fakes.models import VOCABULARY, OddModel, keep_blocks_apart

CPU = torch.device("cpu")
# What torch keeps of the CPU's random state for each block that it may compute again; no operation makes it.
RANDOM_STATE_BYTES = 5056
# What bf16 attention allocates and frees within one operation, which fake tensors do not show.
SCRATCH_BYTES = 16 * 1024
SHAPES = [
    *("model.d_model=64", "model.layers=3", "model.d_ff=160", "model.vocabulary=256"),
    "data.sequence_length=64",
]


def plan_of(*overrides: str) -> Plan:
    run = Run.load(overrides=[*SHAPES, "train.global_batch=2", "precision.mode=fp32", *overrides])
    return Plan.from_run(run, world_size=1)


def decoder(plan: Plan) -> DecoderModel:
    with torch.device("meta"):
        return DecoderModel(plan.run.decoder_config)


def specify(plan: Plan) -> ModelSpec:
    return _specified(plan.model_dump_json())


@cache  # a second each
def _specified(plan: str) -> ModelSpec:
    own = Plan.model_validate_json(plan)
    model = decoder(own)
    return describe(model, own, loss=choose_loss(own.run, model))


def only_trace(plan: Plan) -> MicrobatchTrace:
    return specify(plan).choose_trace(plan.run.recompute, plan.microbatch)


def saved_bytes(trace: MicrobatchTrace, unit: int) -> float:
    """Bytes of activations that the forward of `unit` leaves behind for backward, of 2 sequences."""
    index = next(i for i, p in enumerate(trace.phases) if p.event == "post_forward" and p.unit == unit)
    ends = [phase.end.activations.value_at(2) for phase in trace.phases[index - 2 : index]]
    return ends[1] - ends[0]


def at(moment: LiveTensorBytes, microbatch: int) -> int:
    return round(sum(line.value_at(microbatch) for line in moment))


def highest(phases: tuple[TracePhase, ...], *, microbatch: int = 2) -> int:
    """The peak of one microbatch on one device, which keeps every gradient that the phases hand over."""
    kept = peak = 0
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        peak = max(peak, *(kept + at(moment, microbatch) for moment in phase.peaks))
        if following is not None and following.event == "post_backward":
            kept += round(phase.end.gradients.value_at(microbatch))
    return peak


def allocated(
    model: nn.Module, plan: Plan, *, vocabulary: int, accumulating: bool = False, documents: bool = False
) -> int:
    """The peak of one microbatch of the whole model, as the CPU allocator counts it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPE[plan.precision.param])
    units = find_units(model, plan.run.sharding.units)
    blocks = find_recompute_and_compile_blocks(model, units=units)
    apply_recompute(blocks, plan.run.recompute)
    apply_activation_offload(blocks, plan.run.recompute, device="cpu")
    shape = (plan.microbatch, plan.run.data.sequence_length)
    batch = {name: torch.randint(0, vocabulary, shape) for name in ("tokens", "labels")}
    if documents:
        batch |= {name: torch.zeros(shape, dtype=torch.int64) for name in ("positions", "documents")}
        batch["document_ends"] = torch.full((plan.microbatch, 1), shape[1], dtype=torch.int32)
    loss = choose_loss(plan.run, model)
    if accumulating:
        loss(model, batch)[0].backward()
    with measure_peak_memory(CPU) as peak:
        total, count = loss(model, batch)
        total.backward()
        del total, count
    return peak.bytes


MODES = ("none", "full", "selective")
QUICK = [("full recompute.blocks=2", "fp32"), ("selective", "bf16")]
TRACED = [
    *itertools.product(MODES, ("fp32", "bf16")),
    ("full recompute.blocks=2", "fp32"),
    ("offload", "fp32"),
]


@pytest.mark.parametrize(
    ("recompute", "precision"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in TRACED],
)
def test_trace_bytes_equal_allocated_bytes(recompute, precision):
    plan = plan_of(*f"recompute.mode={recompute}".split(), f"precision.mode={precision}")
    counted = allocated(DecoderModel(plan.run.decoder_config), plan, vocabulary=256)
    difference = counted - highest(only_trace(plan).phases)
    blocks = {"none": 0, "offload": 0, "full recompute.blocks=2": 2}.get(recompute, 3)
    scratch = SCRATCH_BYTES if precision == "bf16" else 0
    assert 0 <= difference <= blocks * RANDOM_STATE_BYTES + scratch


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.long)])
def test_attention_within_documents_is_traced_as_it_allocates(recompute):
    plan = plan_of(f"recompute.mode={recompute}", "data.document_mask=true")
    (trace,) = describe_run(plan, "cpu", cached=False).traces
    counted = allocated(DecoderModel(plan.run.decoder_config), plan, vocabulary=256, documents=True)
    blocks = 3 if recompute == "selective" else 0
    assert 0 <= counted - highest(trace.phases) <= blocks * RANDOM_STATE_BYTES


@pytest.mark.parametrize(
    ("tied", "precision"), [pytest.param(False, "fp32", marks=pytest.mark.long), (True, "bf16")]
)
def test_one_chunk_of_logits_stands_for_all(tied, precision):
    sizes = ("model.vocabulary=4096", f"model.tied={str(tied).lower()}", f"precision.mode={precision}")
    chunked = specify(plan_of(*sizes, "train.loss_chunk=16"))
    whole = specify(plan_of(*sizes, "train.loss_chunk=0"))
    assert (chunked.loss_chunk, whole.loss_chunk) == (16, 0)
    for microbatch in (1, 3):
        plan = plan_of(*sizes, "train.loss_chunk=16", f"train.global_batch={microbatch}")
        counted = allocated(DecoderModel(plan.run.decoder_config), plan, vocabulary=4096)
        trace = chunked.choose_trace(plan.run.recompute, microbatch)
        predicted = highest(trace.phases, microbatch=microbatch)
        assert 0 <= counted - predicted <= (SCRATCH_BYTES if precision == "bf16" else 0)
        without = whole.choose_trace(plan.run.recompute, microbatch)
        assert predicted < highest(without.phases, microbatch=microbatch)
    assert (chunked.flops_per_token, chunked.active_numel) == (whole.flops_per_token, whole.active_numel)
    for microbatch in (1, 4):
        assert matmul_flops(chunked, microbatch) == pytest.approx(matmul_flops(whole, microbatch), rel=1e-9)


def matmul_flops(spec: ModelSpec, microbatch: int) -> float:
    """FLOP of the matmuls of a microbatch's forward and backward."""
    trace = spec.choose_trace(RecomputeSection(mode="none"), microbatch)
    return sum(
        launch.times * kernel.flops.value_at(microbatch)
        for phase in trace.phases
        for launch in phase.work
        if (kernel := spec.kernels[launch.kernel]).kind == "matmul"
    )


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"mixture": True}])
def test_trace_bytes_of_odd_models_equal_allocated_bytes(options):
    plan = plan_of()
    with torch.device("meta"):
        model = OddModel(**options)
    spec = describe(model, plan, loss=next_token_loss)
    counted = allocated(OddModel(**options), plan, vocabulary=VOCABULARY)
    scalar = 512  # the gradient of a 0-d parameter, which no unit holds, and its like
    assert abs(counted - highest(spec.choose_trace(plan.run.recompute, plan.microbatch).phases)) <= scalar


def test_accumulated_gradients_count_once():
    plan = plan_of(
        *(
            "train.global_batch=4",
            "train.microbatch=2",
            "train.gradient_sync=last_microbatch",
            "recompute.mode=full",
        )
    )
    trace = only_trace(plan)
    counted = allocated(DecoderModel(plan.run.decoder_config), plan, vocabulary=256, accumulating=True)
    assert 0 <= counted - highest(trace.accumulating) <= 3 * RANDOM_STATE_BYTES
    assert highest(trace.accumulating) < highest(trace.phases)


def test_a_model_of_70_billion_parameters_is_described_without_its_weights():
    plan = plan_of(
        *("model.d_model=8192", "model.layers=80", "model.d_ff=28672", "model.vocabulary=128256"),
        *("model.heads=64", "model.kv_heads=8", "model.max_sequence=8192", "data.sequence_length=8192"),
    )
    model = decoder(plan)
    for parameter in model.blocks[2:].parameters():
        assert parameter.is_meta
    del model.blocks[2:]  # two blocks stand for eighty
    with measure_peak_memory(CPU) as peak:
        spec = describe(model, plan, loss=next_token_loss)
    assert spec.numel > 3e9
    assert peak.bytes < 2**20


def test_a_model_with_weights_gives_the_same_spec_and_keeps_them():
    plan = plan_of("recompute.mode=full", "precision.mode=bf16")
    model = DecoderModel(plan.run.decoder_config)
    before = {name: (id(p), p.dtype, p.grad) for name, p in model.named_parameters()}
    forwards = [block.forward for block in model.blocks]
    spec = describe(model, plan, loss=next_token_loss)
    assert spec == specify(plan)
    assert {name: (id(p), p.dtype, p.grad) for name, p in model.named_parameters()} == before
    assert [block.forward for block in model.blocks] == forwards


def test_full_recompute_saves_the_inputs_of_blocks_alone():
    full, none = (plan_of(f"recompute.mode={mode}", "precision.mode=bf16") for mode in ("full", "none"))
    spec = specify(full)
    hidden = 2 * 64 * 64 * 2  # (microbatch, sequence, d_model) in bf16
    first = next(i for i, unit in enumerate(spec.units) if unit.is_block)
    assert saved_bytes(spec.traces[0], first) == hidden
    assert saved_bytes(only_trace(none), first) > 10 * hidden


@cache  # a second each
def on_gpu(*overrides: str, batch: int = 2) -> MicrobatchTrace:
    """How a GPU would run six blocks, each of them shown."""
    settings = ("model.layers=6", f"train.global_batch={batch}", "precision.mode=bf16", *overrides)
    model, plan = distinct_blocks(*settings)
    spec = describe(model, plan, loss=next_token_loss, device_type="cuda")
    return spec.choose_trace(plan.run.recompute, plan.microbatch)


def of_forward(trace: MicrobatchTrace, unit: int) -> TracePhase:
    return next(phase for phase in trace.phases if (phase.event, phase.unit) == ("pre_forward", unit))


def test_offloaded_activations_leave_the_gpu() -> None:
    """Activations of each of six blocks, units 1 to 6, move, except those of the last."""
    plain, moved = on_gpu("recompute.mode=none"), on_gpu("recompute.mode=offload")
    sizes = {p.unit: sum(line.value_at(2) for line in p.out) for p in moved.phases if p.out}
    assert list(sizes) == [1, 2, 3, 4, 5]
    tables = 2 * 64 * 8 * 2  # of rotary angles in bf16, which all blocks share
    assert len({sizes[1] - tables, *list(sizes.values())[1:]}) == 1
    ends = [next(p.end for p in one.phases if p.event == "end_forward") for one in (plain, moved)]
    assert at(ends[0], 2) - at(ends[1], 2) == sum(sizes.values()) - tables  # the last block keeps them
    assert sum(line.value_at(2) for p in moved.phases for line in p.back) == sum(sizes.values())


def test_the_inputs_of_recomputed_blocks_leave_the_gpu() -> None:
    """An input of each of six blocks but the last leaves; what is alive after forward is less by as much."""
    kept, moved = on_gpu("recompute.mode=full"), on_gpu("recompute.mode=full", "recompute.inputs=host")
    sizes = {p.unit: sum(line.value_at(2) for line in p.out) for p in moved.phases if p.out}
    assert list(sizes) == [1, 2, 3, 4, 5]
    ends = [next(p.end for p in one.phases if p.event == "end_forward") for one in (kept, moved)]
    tables = 2 * 64 * 8 * 2  # of rotary angles in bf16, which all blocks share
    assert len({sizes[1] - tables, *list(sizes.values())[1:]}) == 1
    assert at(ends[0], 2) - at(ends[1], 2) == sum(sizes.values()) - tables
    assert sum(line.value_at(2) for p in moved.phases for line in p.back) == sum(sizes.values())


def test_at_most_two_blocks_of_offloaded_activations_are_on_the_gpu():
    """In forward the one that computes and the one that leaves, in backward with the one that comes back."""
    plain, moved = on_gpu("recompute.mode=none"), on_gpu("recompute.mode=offload")
    each = sum(line.value_at(2) for line in of_forward(moved, 3).out)
    stays = saved_bytes(plain, 3) - each
    assert stays < each / 16  # what is small: of rows, and of heads
    forward = [of_forward(moved, unit).end.activations.value_at(2) for unit in range(1, 7)]
    # After each block its own are still there; what came before it is gone, but for what stays.
    assert [b - a for a, b in zip(forward[:-2], forward[1:-1], strict=True)] == [stays] * 4
    highest_of = [
        max(sum(line.value_at(2) for line in moment) for moment in of_forward(one, 4).peaks)
        for one in (plain, moved)
    ]
    assert highest_of[0] - highest_of[1] == 2 * each
    backward = [phase for phase in moved.phases if phase.event == "pre_backward" and phase.unit == 3]
    assert sum(line.value_at(2) for line in backward[0].back) == each
    assert backward[0].waits


def test_a_finished_microbatch_leaves_nothing_alive():
    """Two of these models are described by tests above."""
    in_bf16 = [(f"recompute.mode={mode}", "precision.mode=bf16") for mode in ("none", "selective")]
    for overrides in (*in_bf16, ("recompute.mode=offload", "model.layers=2")):
        phases = only_trace(plan_of(*overrides)).phases
        assert phases[-1].event == "end_backward"
        assert phases[-1].end == LiveTensorBytes()


def pins(plan: Plan) -> list[str]:
    """Settings that the trace depends on, and a batch for four ranks."""
    sizes = [
        f"model.layers={plan.run.decoder_config.layers}",
        f"model.vocabulary={plan.run.decoder_config.vocabulary}",
    ]
    batch = ["train.global_batch=16", "train.microbatch=2", "precision.mode=bf16"]
    return [
        *SHAPES[:1],
        *SHAPES[2:3],
        *sizes,
        *SHAPES[4:],
        *batch,
        f"recompute.mode={plan.run.recompute.mode}",
    ]


def distinct_blocks(*overrides: str) -> tuple[DecoderModel, Plan]:
    plan = plan_of(*overrides)
    model = decoder(plan)
    keep_blocks_apart(model.blocks)
    return model, plan


@pytest.mark.long
@pytest.mark.parametrize(
    ("recompute", "vocabulary"),
    [("none", 16), ("full", 16), ("none", 2048), ("selective", 2048), ("offload", 2048)],
)
def test_truncated_trace_predicts_peak_of_all_blocks(recompute, vocabulary):
    """Both if the peak is in backward (few logits), and if it is at the loss."""
    settings = (f"model.vocabulary={vocabulary}", f"recompute.mode={recompute}", "precision.mode=bf16")
    model, plan = distinct_blocks("model.layers=6", *settings)
    whole = describe(model, plan, loss=next_token_loss)
    short = describe(decoder(plan), plan, loss=next_token_loss)
    assert not whole.traces[0].repeats
    assert [repeat.times for repeat in short.traces[0].repeats] == [3]
    for overrides in ([], ["sharding.strategy=zero1"]):
        other = Plan.from_run(Run.load(overrides=[*overrides, *pins(plan)]), world_size=4)
        assert peak_bytes(short, other) == peak_bytes(whole, other)
    assert short.flops_per_token == whole.flops_per_token
    assert short.active_numel == whole.active_numel


@pytest.mark.parametrize("microbatch", [pytest.param(1, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("device_type", [pytest.param("cpu", marks=pytest.mark.long), "cuda"])
def test_two_microbatch_sizes_determine_the_trace(microbatch, device_type):
    plan = plan_of(f"train.global_batch={microbatch}", "precision.mode=bf16")
    shape = (microbatch, 64)
    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}
    batch["scalar"] = torch.empty(())  # so that the batch cannot grow, and is traced as it is
    described = describe(decoder(plan), plan, loss=next_token_loss, device_type=device_type)
    given = describe(decoder(plan), plan, loss=next_token_loss, batch=batch, device_type=device_type)
    assert given.traces[0].microbatch == microbatch
    ours, theirs = (spec.choose_trace(plan.run.recompute, microbatch) for spec in (described, given))
    assert [max(at(moment, microbatch) for moment in phase.peaks) for phase in ours.phases] == [
        max(at(moment, microbatch) for moment in phase.peaks) for phase in theirs.phases
    ]


def test_a_batch_of_any_number_of_rows_describes_the_model_alike():
    def of_rows(rows: int | None, run: Plan | Run, **more: Tensor) -> ModelSpec:
        batch = {key: torch.empty((rows or 1, 64), dtype=torch.int64) for key in ("tokens", "labels")} | more
        given = None if rows is None else batch
        return describe(decoder(plan), run, loss=next_token_loss, batch=given, device_type="cpu")

    shallow = ("model.layers=1", "recompute.mode=none")
    plan = plan_of("train.global_batch=4", "train.microbatch=2", *shallow)
    unpinned = Run.load(overrides=[*SHAPES, "precision.mode=fp32", *shallow, "run.compile=false"])
    assert of_rows(None, plan) == of_rows(1, plan) == of_rows(5, plan)
    assert of_rows(None, unpinned) == of_rows(4, unpinned)
    with pytest.raises(TraceError, match="3 sequences, where a microbatch has 2"):
        of_rows(3, plan, scalar=torch.empty(()))


def test_units_have_names_shapes_ties_and_frozen_parameters():
    plan = plan_of()
    with torch.device("meta"):
        model = OddModel(tied=True)
    spec = describe(model, plan, loss=next_token_loss)
    parameters = {p.name: p for unit in spec.units for p in unit.parameters}
    assert parameters["embedding.weight"].aliases == ("head.weight",)
    assert not parameters["layers.0.frozen.weight"].requires_grad
    assert parameters["layers.1.up.weight"].shape == (7, 10)
    assert spec.numel == sum(p.numel() for p in model.parameters())
    assert [unit.name for unit in spec.units if unit.is_block] == ["layers.0", "layers.1", "layers.2"]
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_spec_of_run_equals_spec_of_its_plan():
    run = Run.load(
        overrides=[
            *SHAPES,
            *("train.global_batch=8", "train.microbatch=2", "precision.mode=bf16", "recompute.mode=none"),
            *("sharding.strategy=hybrid_shard", "sharding.shard_degree=2"),
        ]
    )
    plan = Plan.from_run(run, world_size=4)
    assert describe(decoder(plan), run, loss=next_token_loss) == specify(plan)


def describe_a_sharded_model() -> None:
    from fullshard.training.shard import shard

    plan = plan_of()
    describe(shard(decoder(plan), plan), plan, loss=next_token_loss)


def test_a_sharded_model_is_refused(ranks):
    with pytest.raises(ShardError, match="DecoderModel is sharded already"):
        ranks(1).run(describe_a_sharded_model)


@cache
def matmuls_of_a_gpu(*overrides: str) -> tuple[ModelSpec, dict[str, float]]:
    """The spec of two layers, and the FLOP of the launches of matmuls, by dtype."""
    plan = plan_of("model.layers=2", *overrides)
    spec = describe(decoder(plan), plan, loss=next_token_loss, device_type="cuda")
    flops: dict[str, float] = {}
    for phase in only_trace_of(spec, plan).phases:
        for index, times in phase.work:
            kernel = spec.kernels[index]
            if kernel.kind == "matmul":
                flops[kernel.dtype] = flops.get(kernel.dtype, 0.0) + times * kernel.flops.value_at(2)
    return spec, flops


def only_trace_of(spec: ModelSpec, plan: Plan) -> MicrobatchTrace:
    return spec.choose_trace(plan.run.recompute, plan.microbatch)


@pytest.mark.parametrize("mode", ["fp8", pytest.param("fp8_rowwise", marks=pytest.mark.long)])
def test_matmuls_in_fp8_are_those_of_the_blocks(mode: str):
    pytest.importorskip("torchao")
    spec, flops = matmuls_of_a_gpu(f"precision.mode={mode}", "precision.fp8_min_features=16")
    plain, plain_flops = matmuls_of_a_gpu("precision.mode=bf16")
    head = 3 * 2 * 2 * 64 * 64 * 256  # forward and two in backward, of 2 sequences
    assert flops == {"fp8": plain_flops["bf16"] - head, "bf16": head}
    assert (spec.flops_per_token, spec.active_numel) == (plain.flops_per_token, plain.active_numel)
    in_fp8 = {p.name for unit in spec.units for p in unit.parameters if p.is_gathered_in_fp8}
    matrices = {p.name for unit in spec.units for p in unit.parameters if unit.is_block and len(p.shape) > 1}
    assert in_fp8 == (matrices if mode == "fp8" else set())
    assert [share.matrices for share in spec.fp8] == [14, 2]
    assert plain.fp8 == ()


@pytest.mark.parametrize(
    ("vocabulary", "part"), [pytest.param(257, 1, marks=pytest.mark.long), (260, 1), (264, 0)]
)
def test_matmuls_of_rows_that_are_no_multiple_of_16_bytes_are_unaligned(vocabulary: int, part: int):
    spec, _ = matmuls_of_a_gpu(f"model.vocabulary={vocabulary}", "precision.mode=bf16")
    phases = only_trace_of(spec, plan_of(f"model.vocabulary={vocabulary}", "precision.mode=bf16")).phases
    launches = [(spec.kernels[index], times) for phase in phases for index, times in phase.work]
    unaligned = sum(times * kernel.flops.value_at(2) for kernel, times in launches if kernel.unaligned)
    assert unaligned == part * 3 * 2 * 2 * 64 * 64 * vocabulary  # the head, whose logits have such rows


def test_only_attention_kernels_record_a_head_dim():
    spec, _ = matmuls_of_a_gpu("precision.mode=bf16")
    widths = {kernel.kind: kernel.head_dim for kernel in spec.kernels if kernel.kind != "elementwise"}
    assert widths == {"matmul": 0, "attention": 16, "attention_backward": 16}


def test_partly_frozen_units_are_gathered_for_backward():
    """FSDP2 gathers on the outputs of the module that ran last, and `shard` on those of the others too."""
    plan = plan_of("recompute.mode=none")
    batch = torch.empty((2, LENGTH), dtype=torch.int64, device="meta")
    spec = describe(on_meta("partly_frozen"), plan, loss=loss_of, batch=batch)
    gathered = {phase.unit for phase in spec.traces[0].phases if phase.event == "pre_backward"}
    assert {i for i, unit in enumerate(spec.units) if unit.parameters} <= gathered
