"""The fewest GPUs for a deadline are those of a search over every number of nodes."""

import re
from dataclasses import dataclass, replace

import pytest

from fullshard.errors import PlanError
from fullshard.planner.fewest import least_rank_seconds_per_token, plan_fewest_gpus
from fullshard.planner.result import PlanRequest, search_degrees
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.target import ModelToPlan
from fullshard.report.plan import TrainingBudget
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import divisors
from tests.fakes.hardware import hardware_of
from tests.fakes.sampling import sampled
from tests.fakes.specs import LLAMA_8B, Shape, decoder_spec, run_for

TOKENS = 10**10
NODE = 4
DENSE = {"small": Shape(4, 1024, 2816, 32000, 2048), "8B": replace(LLAMA_8B, layers=4)}


# Traced for each number of ranks that divide its experts.
MIXTURE = (
    *("model.layers=3", "model.d_model=256", "model.heads=4", "model.d_ff=512", "model.experts=8"),
    *("model.vocabulary=1024", "data.sequence_length=256", "recompute.mode=none", "run.compile=false"),
    *("precision.mode=bf16", "run.device=cuda", "train.loss_chunk=0"),
)


@dataclass(frozen=True)
class Target(ModelToPlan):
    """A target whose dense models need no trace."""

    def describe_model(self, run: Run, hardware: Hardware) -> ModelSpec:
        if self.name in DENSE:
            return decoder_spec(DENSE[self.name])
        return super().describe_model(run, hardware)


def request(name: str, nodes: int, each: int, *, batch: int, scale: float) -> PlanRequest:
    """Raises PlanError, as the command does, for ranks that the batch cannot be divided over."""
    hardware = hardware_of(nodes, each, scale=scale)
    own = (f"train.global_batch={batch}", "sharding.tensor_parallel=1")
    run = run_for(DENSE[name], *own) if name in DENSE else Run.load(overrides=[*MIXTURE, *own])
    Plan.from_run(run, world_size=hardware.world_size, device="cuda")
    return PlanRequest(Target(name), run, hardware, Target(name).describe_model(run, hardware))


def days_of(question: PlanRequest) -> float | None:
    best = search_degrees(question).found.best
    return None if best is None else TOKENS / require_prediction(best).tokens_per_second / 86400


def every_size(name: str, *, batch: int, scale: float) -> dict[int, float]:
    """Days for each number of GPUs that the batch can be divided over."""
    sizes = [(1, part) for part in divisors(NODE)] + [(nodes, NODE) for nodes in range(2, 25)]
    found: dict[int, float] = {}
    for nodes, each in sizes:
        try:
            days = days_of(request(name, nodes, each, batch=batch, scale=scale))
        except PlanError:
            continue
        if days is not None:
            found[nodes * each] = days
    return found


# Slow links and uneven batches, with which more nodes may be slower; deadlines that few to many GPUs meet.
CASES = [
    f"{name} {batch} {scale} {part}"
    for name, kinds in (*((name, 4) for name in DENSE), ("mixture", 2))
    for batch, scale in ((96, 1.0), (96, 0.005), (72, 0.02), (80, 0.2))[:kinds]
    for part in (0.05, 0.4, 0.8)
]
SAMPLE = {"small 96 1.0 0.4", "8B 72 0.02 0.05", "mixture 96 0.005 0.4"}


@pytest.mark.parametrize("case", sampled(dict.fromkeys(CASES), here=SAMPLE))
def test_fewest_gpus_are_those_of_every_number_of_nodes(case: str):
    """`part`: how much of the way from the quickest to the slowest number the deadline is."""
    name, batch, scale, part = case.split()
    question = {"batch": int(batch), "scale": float(scale)}
    days = every_size(name, **question)  # type: ignore[arg-type]
    quickest, slowest = min(days.values()), max(days.values())
    deadline = quickest + float(part) * (slowest - quickest)
    expected = min(ranks for ranks, one in days.items() if one <= deadline)
    found = plan_fewest_gpus(
        lambda *, size=(1, NODE), quiet=False: request(name, *size, **question),  # type: ignore[arg-type]
        days=deadline,
        budget=TrainingBudget(tokens=TOKENS),
    )
    assert found.best.world_size == expected
    assert re.fullmatch(f"fewest for .* days: {expected} GPUs?", found.answer)


@pytest.mark.parametrize("name", DENSE)
def test_kernels_alone_take_no_longer_than_any_plan(name: str):
    for nodes, each, batch in ((1, 1, 8), (1, 4, 96), (3, 4, 96)):
        question = request(name, nodes, each, batch=batch, scale=10.0)
        best = search_degrees(question).found.best
        assert best is not None
        seconds = best.world_size / require_prediction(best).tokens_per_second
        assert 0.3 * seconds < least_rank_seconds_per_token(question.spec, question.hardware) <= seconds


def test_too_little_memory_for_any_number_is_named():
    def build(*, size: tuple[int, int] = (1, NODE), quiet: bool = False) -> PlanRequest:
        asked = request("small", *size, batch=96, scale=1.0)
        chip = asked.hardware.chip.model_copy(update={"memory_bytes": 2**20})
        return replace(asked, hardware=asked.hardware.model_copy(update={"chip": chip, "across": None}))

    with pytest.raises(PlanError, match="the quickest that fits: none(.|\n)*more memory") as raised:
        plan_fewest_gpus(build, days=1000, budget=TrainingBudget(tokens=TOKENS))
    assert "tried up to 1 node: the link between nodes is not known" in str(raised.value)


def test_a_deadline_that_no_number_meets_names_the_quickest():
    with pytest.raises(PlanError, match="no number of GPUs that was tried is done in 0.001 days") as raised:
        plan_fewest_gpus(
            lambda *, size=(1, NODE), quiet=False: request("small", *size, batch=8, scale=1.0),
            days=0.001,
            budget=TrainingBudget(tokens=TOKENS),
        )
    assert "--tokens-per-step" in str(raised.value)
    assert re.search(r"tried up to [\d,]+ nodes: 4 times what kernels need, at least 64", str(raised.value))
