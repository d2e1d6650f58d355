"""A whole run on ranks: what it leaves behind to be held against its prediction."""

import io
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.jobs.run_start import guessing_warning
from fullshard.jobs.train import gather_highest_peak, run_job
from fullshard.models.loss import next_token_loss
from fullshard.observe.memory import PeakMemory
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import read_events
from fullshard.spec.records.measurement import Measurement, MemoryParts, PeakBytes
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from tests.data.samples import write_json_lines
from tests.fakes.device import FakeDevice
from tests.training.runs import run_of, sharded

TINY = (
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=32"),
    *("data.sequence_length=16", "train.global_batch=8", "train.validate_every=0"),
    "train.validate_sequences=4",
)


def leaves_a_measurement(directory: str, steps: int, *settings: str) -> None:
    run = Run.load(overrides=[*TINY, f"train.steps={steps}", f"run.dir={directory}", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())


@pytest.mark.parametrize(
    ("strategy", "collectives"),
    [
        ("full_shard", ("exposed_all_gather", "exposed_reduce_scatter", "exposed_all_reduce")),
        ("no_shard", ("exposed_all_reduce",)),
    ],
)
def test_terms_of_a_step_sum_to_the_pace_without_profiled_steps(
    ranks, tmp_path: Path, strategy: str, collectives: tuple[str, ...]
):
    ranks(2).run(leaves_a_measurement, str(tmp_path / "run"), 8, f"sharding.strategy={strategy}")
    made = Measurement.load(tmp_path / "run" / "measurement.json")
    assert made.step_seconds is not None
    assert made.step_seconds.total == pytest.approx(made.pace.step_seconds)
    present = {name for name, seconds in made.step_seconds.terms().items() if seconds > 0}
    assert present == {"compute", "engine", "optimizer", "data", "other", *collectives}
    # The second step is metered, in the warmup; the last is profiled, behind it.
    pace = made.pace
    assert (pace.steps, pace.warmup_steps, pace.untimed_steps, pace.timed_steps) == (8, 5, 1, 2)


def highest_peak() -> tuple[PeakBytes | None, int]:
    state, plan = sharded(run_of("train.steps=1"))
    rank = dist.get_rank()
    own = dict.fromkeys(MemoryParts.model_fields, 7) | {"gradients": (5, 3000, 20)[rank], "rest": 100 - rank}
    found = gather_highest_peak(PeakMemory(parts=MemoryParts(**own)), state, plan=plan)
    return found, sum(own.values())


def test_the_highest_peak_is_that_of_one_rank(ranks):
    found = ranks(3).run(highest_peak)
    assert {peak.total for peak, _ in found} == {max(total for _, total in found)}
    assert [(peak.gradients, peak.rest, peak.host) for peak, _ in found] == [(3000, 99, None)] * 3


def standard_error_of_run(directory: str, *settings: str) -> str:
    with redirect_stderr(io.StringIO()) as printed:
        leaves_a_measurement(directory, 1, *settings)
    return printed.getvalue()


def test_adapters_of_a_base_that_guesses_are_warned_of(ranks, tmp_path: Path):
    for name, settings in (("new", ()), ("adapted", ("adapter.rank=2",))):
        [printed] = ranks(1).run(standard_error_of_run, str(tmp_path / name), *settings)
        assert ("is that of guessing among 256 tokens" in printed) == (name == "adapted"), printed


@pytest.mark.parametrize(("loss", "guesses"), [(0.8, False), (0.95, True), (1.3, True)])
def test_a_first_loss_near_or_over_the_logarithm_of_the_vocabulary_is_guessing(loss: float, guesses: bool):
    warning = guessing_warning(loss * math.log(32_000), vocabulary=32_000)
    assert (warning is not None) == guesses


def mean_over_valid_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total, count = next_token_loss(model, batch)
    return total / count.clamp(min=1)


def chats(directory: Path) -> tuple[str, ...]:
    """Returns the settings of conversations of two lengths, whose answers alone are trained on."""
    rows = ({"prompt": "how many? " * (1, 1, 1, 5)[i % 4], "completion": f" {i}"} for i in range(400))
    path = write_json_lines(directory / "chats.jsonl", rows)
    fields = ("records=completion", "train_on=completion", "packing=none")
    return ("data.source=jsonl", f"data.paths=['{path}']", *(f"data.{field}" for field in fields))


@pytest.mark.parametrize("kind", ["masked", "padded", "mean"])
def test_measured_and_planned_speeds_differ_only_as_the_steps_do(ranks, tmp_path: Path, kind: str):
    settings = {
        "masked": (*chats(tmp_path), "data.packing=best_fit", "data.sequence_length=64"),
        "padded": (*chats(tmp_path), "data.train_on=all", "data.sequence_length=48"),
        "mean": ("train.loss=tests.jobs.test_train:mean_over_valid_tokens",),
    }[kind]
    ranks(2).run(leaves_a_measurement, str(tmp_path / "run"), 7, "log.trace_every=0", *settings)
    made = Measurement.load(tmp_path / "run" / "measurement.json")
    planned, pace = Plan.load(tmp_path / "run" / "plan.json").run.tokens_per_step, made.pace
    assert pace.tokens == pace.timed_steps * planned
    assert made.has_own_loss == (kind == "mean")
    assert (pace.trained_share is None) if kind == "mean" else ((pace.trained_share or 1) < 0.7)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["tokens_per_second"] == pytest.approx(planned / step["seconds"])


calls = WeakKeyDictionary[nn.Module, Iterator[int]]()


def not_finite_once(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """The next-token loss, except that the eleventh microbatch of a model has none."""
    total, number = next_token_loss(model, batch)
    return total * (torch.nan if next(calls.setdefault(model, count(1))) == 11 else 1), number


def test_a_run_that_goes_back_and_over_batches_leaves_one_curve(ranks, tmp_path: Path):
    """A checkpoint after every third step, of which each has one microbatch."""
    settings = ("checkpoint.every=3", "log.trace_every=0", "train.max_skipped_steps=1")
    settings += ("fault_tolerance.on_spike=rollback", f"train.loss={__name__}:not_finite_once")
    ranks(2).run(leaves_a_measurement, str(tmp_path / "run"), 12, *settings)
    made = Measurement.load(tmp_path / "run" / "measurement.json")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert not lines[10]["skipped"], "the later step 11"
    assert made.last_step == 12
    assert made.repeated_steps > 0
    events = [(event.event, event.step) for event in read_events(tmp_path / "run" / EVENTS)]
    assert {("skip", 11), ("rollback", 11)} <= set(events), "events that a rollback undid stay"


def leaves_metrics(directory: str, device: str, settings: tuple[str, ...]) -> None:
    with FakeDevice() if device == "fake" else nullcontext():
        leaves_a_measurement(directory, 9, "log.trace_every=0", *settings)


def test_a_run_that_reads_its_figures_later_records_the_same_ones(ranks, tmp_path: Path):
    """Steps are validated and saved in between, which reads them at once."""
    settings = ("train.validate_every=4", "checkpoint.every=3", "log.every=2")
    for device in ("cpu", "fake"):
        ranks(2).run(leaves_metrics, str(tmp_path / device), device, settings)
    on_cpu, on_fake = (
        [json.loads(line) for line in (tmp_path / device / "metrics.jsonl").read_text().splitlines()]
        for device in ("cpu", "fake")
    )
    for line, same in zip(on_cpu, on_fake, strict=True):
        timed = {name for name in line if "second" in name or name == "mfu" or "_bytes" in name}
        assert {k: v for k, v in line.items() if k not in timed} == {
            k: v for k, v in same.items() if k not in timed
        }
    measured = [Measurement.load(tmp_path / device / "measurement.json") for device in ("cpu", "fake")]
    assert measured[0].last_loss == measured[1].last_loss
    assert measured[0].pace.steps == measured[1].pace.steps == 9


def ends_not_finite(directory: str, device: str) -> None:
    settings = ("optimizer.learning_rate=1e30", "schedule.warmup_steps=0", "train.max_skipped_steps=2")
    with pytest.raises(TrainError, match="2 steps in a row"):
        leaves_metrics(directory, device, settings)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_run_that_fails_has_recorded_all_of_its_steps(ranks, tmp_path: Path, device: str):
    ranks(1).run(ends_not_finite, str(tmp_path), device)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    skipped = [line["skipped"] for line in lines].index(True)
    assert len(lines) - skipped == {"cpu": 2, "fake": 3}[device], "the one that was launched already, too"
