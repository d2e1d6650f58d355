"""Rates are of the timed steps; what is written is what is read."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import SpecError
from fullshard.spec.records.measurement import (
    MatmulPeak,
    Measurement,
    PeakBytes,
    StepSeconds,
    Throughput,
    model_flops_per_token,
)
from fullshard.spec.run import Strategy


def pace(
    steps: int = 10, warmup: int = 4, *, tokens: int = 100, trained: int = 100, seconds: float = 0.5
) -> Throughput:
    made = Throughput(warmup_steps=warmup, trained_tokens=0)
    for _ in range(steps):
        made = made.with_step(
            tokens=tokens, trained_tokens=trained, seconds=seconds, data_seconds=seconds / 5
        )
    return made


def measurement(**changes: object) -> Measurement:
    fields = {
        "directory": "runs/default",
        "strategy": Strategy.FULL_SHARD,
        "world_size": 2,
        "device": "cpu",
        "first_step": 1,
        "pace": pace(),
        "flops_per_token": 1e6,
        "peak": MatmulPeak(flops_per_second=1e9, dtype="fp32", source="measured", device="cpu"),
        "peak_bytes": PeakBytes(
            parameter_shards=1, gradients=2, optimizer_state=4, buffers=8, units_in_flight=16, rest=32
        ),
    }
    return Measurement.model_validate(fields | changes)


@given(
    steps=st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 1e3)), max_size=20),
    warmup=st.integers(0, 25),
)
def test_throughput_sums_steps_after_the_warmup(steps: list[tuple[int, float]], warmup: int):
    made = Throughput(warmup_steps=warmup, trained_tokens=0)
    for tokens, seconds in steps:
        made = made.with_step(tokens=tokens, trained_tokens=tokens // 2, seconds=seconds)
    timed = steps[warmup:]
    assert made.steps == len(steps)
    assert made.timed_steps == len(timed)
    assert made.tokens == sum(tokens for tokens, _ in timed)
    assert made.trained_tokens == sum(tokens // 2 for tokens, _ in timed)
    assert made.seconds == pytest.approx(sum(seconds for _, seconds in timed))
    assert (made.tokens_per_second is None) == (not timed)


def test_a_step_that_was_slowed_by_being_measured_is_in_no_speed():
    made = pace(6, 4).with_step(tokens=100, trained_tokens=9, seconds=9.0, is_slowed=True)
    assert (made.steps, made.timed_steps, made.seconds) == (7, 2, pace(6, 4).seconds)
    # In the warmup it is left out anyway, once.
    warm = Throughput(warmup_steps=1).with_step(tokens=100, trained_tokens=9, seconds=9.0, is_slowed=True)
    assert (warm.untimed_steps, warm.timed_steps) == (0, 0)


@given(parts=st.lists(st.floats(0, 1e3), min_size=9, max_size=9), total=st.floats(0, 1e3))
def test_seconds_are_scaled_to_another_whole_by_their_shares(parts: list[float], total: float):
    made = StepSeconds(**dict(zip(StepSeconds.model_fields, parts, strict=True)))
    assert made.total == pytest.approx(sum(parts))
    assert made.scaled_to(total).total == pytest.approx(total if sum(parts) > 1e-300 else 0)


def test_mfu_is_the_flops_a_second_of_one_rank_over_its_peak():
    made = measurement()
    assert made.tokens_per_second == pytest.approx(200)
    assert made.mfu == pytest.approx(100 * 1e6 / 1e9)


@pytest.mark.parametrize("unknown", [{"peak": None}, {"flops_per_token": None}, {"pace": pace(3)}])
def test_mfu_of_unknown_figures_is_none(unknown: dict[str, object]):
    assert measurement(**unknown).mfu is None


def test_a_measurement_reads_back_as_it_was_and_shows_its_rates(tmp_path: Path):
    path = tmp_path / "measurement.json"
    made = measurement(first_loss=math.nan, last_loss=1.5)
    made.save(path)
    assert Measurement.load(path) == made
    written = json.loads(path.read_text())
    assert written["tokens_per_second"] == made.tokens_per_second
    assert written["mfu"] == made.mfu
    assert written["first_loss"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_a_measurement_of_before_steps_were_profiled_still_loads(tmp_path: Path):
    path = tmp_path / "measurement.json"
    made = measurement(step_seconds=StepSeconds(compute=0.5))
    made.save(path)
    assert Measurement.load(path) == made
    old = json.loads(path.read_text())
    del old["step_seconds"], old["pace"]["untimed_steps"], old["pace"]["trained_tokens"]
    path.write_text(json.dumps(old))
    loaded = Measurement.load(path)
    assert loaded.pace.trained_share is None
    assert loaded == measurement(pace=measurement().pace.model_copy(update={"trained_tokens": None}))


@pytest.mark.parametrize("text", ["", "{}", '{"steps": 1}', "[1]"])
def test_files_that_are_not_measurements_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "measurement.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="not a saved measurement"):
        Measurement.load(path)


def test_flops_per_token_are_those_of_the_palm_paper():
    # PaLM 540B: 118 layers, 48 heads of 256, sequences of 2,048; the attention is 1.1 % of the whole.
    flops = model_flops_per_token(540_350_000_000, layers=118, d_model=48 * 256, sequence_length=2048)
    assert flops == 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048
    assert flops / (6 * 540_350_000_000) == pytest.approx(1.011, abs=1e-4)
