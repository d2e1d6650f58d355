"""A step on real ranks, measured; and the same step, predicted. Both return plain values."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.models.build import build_model
from fullshard.models.loss import next_token_loss
from fullshard.observe.memory import PeakMemory, measure_peak_memory
from fullshard.offload.state import find_offloaded_state, offloaded_host_bytes
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import predict
from fullshard.spec.machine.hardware import CollectiveRate, Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step
from tests.fakes.hardware import cpu_of

# Large enough that scalars and scratch are nothing, small enough for a step in a tenth of a second.
SHAPES = ["model.d_model=128", "model.layers=2", "model.d_ff=384", "model.vocabulary=1024"]
MOST_STEPS = 8  # that are measured
FEWEST_TOKENS = 32  # in the vocabulary of every model of `tests.fakes.architectures_hf`


def plan_of(ranks: int, *overrides: str, accumulation: int = 1) -> Plan:
    """A plan of 2 sequences of 64 tokens a microbatch, in fp32, with `overrides` over it.

    SHAPES are for the decoder, not for a model of transformers.
    """
    batch = [f"train.global_batch={2 * ranks * accumulation}", "train.microbatch=2"]
    shapes = [] if any(one.startswith("model.hf=") for one in overrides) else SHAPES
    fixed = [*shapes, *batch, "data.sequence_length=64", "precision.mode=fp32"]
    return Plan.from_run(Run.load(overrides=[*fixed, *overrides]), world_size=ranks)


def meta_model(plan: Plan, *, frozen: str = "") -> nn.Module:
    """`frozen`: a shell pattern of parameters that are not trained; with adapters, all others are frozen."""
    model = build_model(plan.run)
    for name, parameter in model.named_parameters() if not plan.run.adapter.rank else ():
        parameter.requires_grad_(not fnmatch(name, frozen))
    return model


def described(plan: Plan, *, frozen: str = "") -> ModelSpec:
    """Described once for all plans that it holds for: see `describe`."""
    run = plan.run
    units = run.sharding.units.model_dump_json()
    settings = (run.model, run.data, run.precision, run.recompute, run.adapter)
    degrees = (plan.tensor_parallel, plan.context_parallel, plan.expert_parallel)
    key = (plan.device, frozen, units, degrees, *(section.model_dump_json() for section in settings))
    if key not in _DESCRIBED:  # a second each
        found = describe(meta_model(plan, frozen=frozen), plan, loss=next_token_loss)
        _DESCRIBED[key] = evenly_routed(found)
    return _DESCRIBED[key]


_DESCRIBED: dict[tuple[str, ...], ModelSpec] = {}


def evenly_routed(spec: ModelSpec) -> ModelSpec:
    """The spec with forced balance, so that all ranks need the same."""
    return spec.model_copy(update={"routing_spread": 0.0})


def predicted(plan: Plan, *, frozen: str = "", rank: int = 0) -> MemoryTerms:
    return peak_bytes(described(plan, frozen=frozen), plan, rank=rank)


def hardware_of_one_byte_per_second(ranks: int) -> Hardware:
    """CPU ranks whose gathers and reduce-scatters take a second per byte: predicted seconds are bytes."""
    rate = CollectiveRate(base_seconds=0, hop_seconds=0, bytes_per_second=1)
    free = rate.model_copy(update={"bytes_per_second": 1e30})
    hardware = cpu_of(ranks)
    link = hardware.within.model_copy(update={"all_gather": rate, "reduce_scatter": rate, "all_reduce": free})
    return hardware.model_copy(update={"within": link})


class CountBytes(TorchDispatchMode):
    """Counts the bytes of whole tensors in collectives among ranks that share work, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        if name in ("gather_sequence", "reduce_sequence", "exchange_rows"):
            self.bytes[name] += max(args[0].nbytes, 0 if name == "exchange_rows" else result.nbytes)
        return result


def moved_bytes(plan: Plan) -> Counter[str]:
    """Counts the bytes of a step on this rank, those for itself included."""
    model = shard(meta_model(plan), plan)
    state = TrainState(model, build_optimizer(model, plan))
    with torch.autograd.set_multithreading_enabled(False), CountBytes() as count:
        run_step(state, plan, microbatches=microbatches(plan), loss=next_token_loss)
    return count.bytes


def model_parallel_bytes(plan: Plan) -> float:
    """Bytes that the plan counts for collectives among ranks that share work."""
    hardware = hardware_of_one_byte_per_second(plan.world_size)
    return require_prediction(predict(described(plan), plan, hardware)).time.model_parallel


def microbatches(plan: Plan) -> Iterator[dict[str, Tensor]]:
    """This rank's microbatches of a step."""
    shape, section = (plan.microbatch, plan.run.data.sequence_length), plan.run.model
    vocabulary = section.vocabulary if isinstance(section, DecoderConfig) else FEWEST_TOKENS
    for _ in range(plan.accumulation):
        batch = {name: torch.randint(0, vocabulary, shape) for name in ("tokens", "labels")}
        yield cut_sequences(batch, plan)


def is_lowest_seen_twice(peaks: Sequence[PeakMemory]) -> bool:
    lowest = sorted(one.bytes for one in peaks)[:2]
    return len(lowest) == 2 and lowest[1] <= 1.001 * lowest[0]


def on_all_ranks(holds: bool) -> bool:
    """Collective."""
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def measured(plan: Plan, frozen: str = "", *, most_steps: int = MOST_STEPS) -> dict[str, int]:
    """On a rank: the parts of a later step's peak. The first step makes the optimizer's state.

    The lowest of as many as it takes to see it twice: where the machine is busy, gloo's thread may let go of
    a tensor last, and that release the meter does not see. So a step may look higher than it was, but never
    lower.
    """
    model = shard(meta_model(plan, frozen=frozen), plan)
    state = TrainState(model, build_optimizer(model, plan), ema=plan.run.ema.decay > 0)
    if state.average is not None:
        state.average.begin()
    averages = state.average.device_tensors if state.average is not None else ()

    def step() -> None:
        run_step(state, plan, microbatches=microbatches(plan), loss=next_token_loss)

    step()
    peaks: list[PeakMemory] = []
    while len(peaks) < most_steps and not on_all_ranks(is_lowest_seen_twice(peaks)):
        with measure_peak_memory(
            torch.device("cpu"), model=model, optimizer=state.optimizer, averages=averages
        ) as peak:
            step()
        peaks.append(peak)
    parts = min(peaks, key=lambda one: one.bytes).parts
    assert parts is not None, "a model was given"
    found = parts.parts()
    if (offloaded := find_offloaded_state(model)) is not None:
        if offloaded.masters:  # they are the shards
            found["parameter_shards"] = 0
        found["host"] = offloaded_host_bytes(offloaded)
        found["host"] += state.average.host_bytes if state.average is not None else 0
        state.wait_for_updates()
    return found


def measured_in_two_steps(plan: Plan) -> dict[str, int]:
    """As `measured`, of a mixture whose router chooses anew in each step: of many, the lowest is too low."""
    return measured(plan, most_steps=2)
