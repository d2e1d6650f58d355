"""The ModelSpec of a decoder by formula: what describing one gives, in rough, and at once.

Only the order of phases, the shapes of parameters and the largest terms are like a real one's.
"""

from dataclasses import dataclass

from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import (
    Event,
    Kernel,
    KernelIndexAndCount,
    LinearInMicrobatch,
    LiveTensorBytes,
    MicrobatchTrace,
    ModelSpec,
    ParamSpec,
    RepeatedUnits,
    TracePhase,
    UnitSpec,
)
from fullshard.spec.plan import Dtype, Plan, Precision
from fullshard.spec.prediction import TimeTerms
from fullshard.spec.run import PrecisionMode, Run
from fullshard.spec.settings.train_section import RecomputeSection

MODES: tuple[RecomputeSection, ...] = tuple(
    RecomputeSection.model_validate({"mode": mode}) for mode in ("none", "full", "selective")
)


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; `layers` at least 3, and `compressed` shows three of them in the trace. `frozen`:
    all is, but the norms."""

    layers: int = 6
    d_model: int = 64
    d_ff: int = 192
    vocabulary: int = 256
    sequence: int = 128
    precision: PrecisionMode = "bf16"
    compressed: bool = True
    frozen: bool = False

    @property
    def shown(self) -> int:
        return min(self.layers, 3) if self.compressed else self.layers


LLAMA_405B = Shape(126, 16384, 53248, 128256, 8192)
LLAMA_8B = Shape(32, 4096, 14336, 128256, 8192)


def decoder_spec(
    shape: Shape, *, modes: tuple[RecomputeSection, ...] = MODES, compiled: bool = False
) -> ModelSpec:
    """Units: embedding, blocks, norm and head, root (without parameters), in order of use.

    compiled: with traces of compiled blocks, too
    """
    d, f, v = shape.d_model, shape.d_ff, shape.vocabulary
    block = {
        "qkv": (3 * d, d),
        "out": (d, d),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
        "norms": (2 * d,),
    }
    units = [
        UnitSpec(name="embedding", position=1, parameters=_parameters({"table": (v, d)}, shape)),
        *(
            UnitSpec(name=f"blocks.{i}", position=2 + i, parameters=_parameters(block, shape), is_block=True)
            for i in range(shape.layers)
        ),
        UnitSpec(
            name="head",
            position=2 + shape.layers,
            parameters=_parameters({"norm": (d,), "head": (v, d)}, shape),
            kept=True,
        ),
        UnitSpec(name="root", position=0, parameters=(), kept=True),
    ]
    matmul = 3 * d * d + d * d + 3 * d * f
    return ModelSpec(
        name="decoder",
        sequence_length=shape.sequence,
        precision=Precision.from_mode(shape.precision),
        units=tuple(units),
        buffer_bytes=0,
        kernels=_kernels(shape),
        traces=tuple(
            _Tracer(shape, mode, one).trace()
            for mode in modes
            for one in ((False, True) if compiled else (False,))
        ),
        flops_per_token=6 * (shape.layers * matmul + v * d) + 12 * shape.layers * d * shape.sequence,
    )


def run_for(shape: Shape, *overrides: str) -> Run:
    """A run that leaves all mechanisms open, of this shape's sequence length and precision."""
    fixed = [
        "sharding.strategy=auto",
        "recompute.mode=auto",
        f"model.max_sequence={shape.sequence}",
        f"data.sequence_length={shape.sequence}",
        f"precision.mode={shape.precision}",
        "train.loss_chunk=0",
    ]
    return Run.load(overrides=[*fixed, *overrides])


def plan_for(shape: Shape, world_size: int, *overrides: str) -> Plan:
    """The plan of `run_for` with the plain defaults."""
    return Plan.from_run(run_for(shape, *overrides), world_size=world_size, device="cuda")


def phases_with_kernels(spec: ModelSpec, trace: MicrobatchTrace) -> list[object]:
    """Returns all phases of a trace, each with the kernels of its launches instead of their indices."""
    return [
        (
            phase.model_copy(update={"work": ()}),
            [(spec.kernels[launch.kernel], launch.times) for launch in phase.work],
        )
        for phase in trace.phases
    ]


def _parameters(shapes: dict[str, tuple[int, ...]], shape: Shape) -> tuple[ParamSpec, ...]:
    return tuple(
        ParamSpec(name=name, shape=own, requires_grad=not shape.frozen or name.startswith("norm"))
        for name, own in shapes.items()
    )


def _kernels(shape: Shape) -> tuple[Kernel, ...]:
    """0 a block's matmul, 1 attention, 2 its backward, 3 elementwise, 4 the head, 5 the loss, 6 fused."""
    d, f, v, t = shape.d_model, shape.d_ff, shape.vocabulary, shape.sequence
    dtype: Dtype = Precision.from_mode(shape.precision).param
    size = 4 if dtype == "fp32" else 2
    matmul = (4 * d * d + 3 * d * f) / 7
    return (
        Kernel(
            kind="matmul",
            dtype=dtype,
            flops=LinearInMicrobatch(0, 2 * t * matmul),
            bytes=LinearInMicrobatch(size * matmul, size * t * d),
        ),
        Kernel(kind="attention", dtype=dtype, flops=LinearInMicrobatch(0, 2 * t * t * d), causal=True),
        Kernel(
            kind="attention_backward", dtype=dtype, flops=LinearInMicrobatch(0, 5 * t * t * d), causal=True
        ),
        Kernel(kind="elementwise", dtype=dtype, bytes=LinearInMicrobatch(0, size * 2 * t * d)),
        Kernel(kind="matmul", dtype=dtype, flops=LinearInMicrobatch(0, 2 * t * v * d)),
        Kernel(kind="elementwise", dtype="fp32", bytes=LinearInMicrobatch(0, 12 * t * v)),
        Kernel(kind="elementwise", dtype=dtype, bytes=LinearInMicrobatch(0, size * 6 * t * d)),
    )


class _Tracer:
    """Phases of one microbatch; bytes alive are summed over the phases."""

    def __init__(self, shape: Shape, mode: RecomputeSection, compiled: bool) -> None:
        self.shape, self.mode, self.compiled = shape, mode, compiled
        self.phases: list[TracePhase] = []
        self.saved = self.loss = 0.0
        d, f, t = shape.d_model, shape.d_ff, shape.sequence
        full, none, selective = 2 * d * t, (16 * d + 8 * f) * t, (10 * d + 2 * f) * t
        saved = {"none": none, "full": full, "selective": selective}
        self.per_block, self.again = saved[mode.mode], none - saved[mode.mode]
        if compiled and mode.mode == "none":
            self.per_block, self.again = none - 2 * f * t, 2 * f * t

    def trace(self) -> MicrobatchTrace:
        shape, blocks = self.shape, list(range(1, self.shape.shown + 1))
        head, root = blocks[-1] + 1, blocks[-1] + 2
        table = shape.vocabulary * shape.d_model
        weights = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model
        self.add("start")
        self.add("pre_forward", root)
        self.add("pre_forward", 0, ((3, 1),))
        self.saved += 2 * shape.sequence * shape.d_model
        self.add("post_forward", 0)
        for block in blocks:
            self.add("pre_forward", block, ((0, 7), (1, 1), *(((6, 3),) if self.compiled else ((3, 12),))))
            self.saved += self.per_block
            self.add("post_forward", block)
        self.add("pre_forward", head, ((4, 1), (3, 3)))
        self.add("post_forward", head)
        self.add("post_forward", root)
        self.loss = 10.0 * shape.sequence * shape.vocabulary
        self.add("end_forward", -1, ((5, 2),))
        self.add("pre_backward", root)
        self.add("pre_backward", head, ((4, 2), (3, 3)), gradients=table + shape.d_model)
        self.loss = 0.0
        self.add("post_backward", head)
        extra = {
            "none": (),
            "full": ((0, 7), (1, 1), (3, 12)),
            "selective": ((3, 12),),
        }
        for block in reversed(blocks):
            work = ((0, 14), (2, 1), (3, 24), *extra[self.mode.mode])
            if self.compiled:
                work = ((0, 14), (2, 1), (6, 6), *(one for one in extra[self.mode.mode] if one[0] != 3))
            self.add("pre_backward", block, work, again=self.again, gradients=weights)
            self.saved -= self.per_block
            self.add("post_backward", block)
        self.add("pre_backward", 0, ((3, 2),), gradients=table)
        self.saved = 0.0
        self.add("post_backward", root)
        self.add("post_backward", 0)
        self.add("end_backward")
        times = shape.layers - 2
        repeats = (RepeatedUnits(first=2, units=1, times=times),) if shape.shown < shape.layers else ()
        return MicrobatchTrace(
            recompute=self.mode,
            compiled=self.compiled,
            batch_bytes=LinearInMicrobatch(0, 16 * shape.sequence),
            phases=tuple(self.phases),
            repeats=repeats,
        )

    def add(
        self,
        event: Event,
        unit: int = -1,
        work: tuple[tuple[int, int], ...] = (),
        *,
        again: float = 0.0,
        gradients: int = 0,
    ) -> None:
        """`gradients`: elements of the unit's gradients, which stay until its post_backward takes them."""
        size = 4 if Precision.from_mode(self.shape.precision).param == "fp32" else 2
        live = LiveTensorBytes(
            activations=LinearInMicrobatch(0, self.saved),
            loss=LinearInMicrobatch(0, self.loss),
            gradients=LinearInMicrobatch(size * gradients, 0),
        )
        peak = live._replace(backward=LinearInMicrobatch(0, again))
        self.phases.append(
            TracePhase(
                event=event,
                unit=unit,
                peaks=(peak,),
                end=live,
                work=tuple(KernelIndexAndCount(*one) for one in work),
            )
        )


def predict_terms(spec: ModelSpec, plan: Plan, hardware: Hardware) -> TimeTerms:
    return StepTimePredictor(spec, hardware).predict_time(plan)
