"""The learning rate: warmup, shape, and end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import ScheduleSection
from fullshard.training.learning_rates import learning_rate_factor, warmup_warning

FALLING = ("cosine", "linear", "wsd")
KINDS = (*FALLING, "constant")


def rates(section: ScheduleSection, steps: int) -> list[float]:
    return [learning_rate_factor(section, step=step, steps=steps) for step in range(steps)]


def section(kind: str, *, warmup: int = 0, final: float = 0.1, decay: float = 0.2) -> ScheduleSection:
    return ScheduleSection.model_validate(
        {"kind": kind, "warmup_steps": warmup, "min_lr_ratio": final, "decay_fraction": decay}
    )


any_section = st.builds(
    section,
    st.sampled_from(KINDS),
    warmup=st.integers(0, 30),
    final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)


@given(any_section, st.integers(1, 200))
def test_warmup_rises_by_equal_parts_to_the_peak(section: ScheduleSection, steps: int) -> None:
    warmup = section.warmup_steps
    expected = [(step + 1) / warmup for step in range(min(warmup, steps))]
    assert rates(section, steps)[:warmup] == pytest.approx(expected)
    if steps >= warmup > 0:
        assert rates(section, steps)[warmup - 1] == 1


@given(any_section, st.integers(1, 200))
def test_after_warmup_it_begins_at_the_peak_and_never_rises(section: ScheduleSection, steps: int) -> None:
    after = rates(section, steps)[section.warmup_steps :]
    assert all(rate == pytest.approx(1) for rate in after[:1])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after, after[1:], strict=False))


@given(any_section, st.integers(2, 200))
def test_the_last_step_is_at_the_final_ratio_and_so_are_those_beyond(
    section: ScheduleSection, steps: int
) -> None:
    steps += section.warmup_steps
    end = 1.0 if section.kind == "constant" else section.min_lr_ratio
    assert rates(section, steps)[-1] == pytest.approx(end)
    assert learning_rate_factor(section, step=steps + 5, steps=steps) == pytest.approx(end)


@given(any_section, st.integers(2, 200))
def test_no_step_falls_more_than_the_steepest_slope(section: ScheduleSection, steps: int) -> None:
    steps += section.warmup_steps
    after = rates(section, steps)[section.warmup_steps :]
    length = len(after) - 1
    if section.kind == "wsd":
        length = min(length, section.decay_fraction * steps)
    steepest = (1 - section.min_lr_ratio) * (math.pi / 2 if section.kind == "cosine" else 1) / length
    for earlier, later in zip(after, after[1:], strict=False):
        assert earlier - later <= min(steepest, 1 - section.min_lr_ratio) + 1e-9


def test_wsd_stays_at_the_peak_until_the_last_fraction_of_all_steps() -> None:
    got = rates(section("wsd", warmup=20, final=0.0, decay=0.2), 100)
    assert got[20:80] == [1.0] * 60
    assert got[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


def test_wsd_that_decays_all_along_is_linear() -> None:
    assert rates(section("wsd", warmup=7, decay=1.0), 50) == pytest.approx(
        rates(section("linear", warmup=7), 50)
    )


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(section("cosine", warmup=10, final=0.2), 31)[20] == pytest.approx(0.6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_step_takes_it_at_the_peak(kind: str) -> None:
    assert rates(section(kind), 1) == [1.0]
    assert rates(section(kind, warmup=3), 4)[-1] == 1.0  # the only step after the warmup


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_shorter_than_its_warmup_never_reaches_the_peak(kind: str) -> None:
    assert rates(section(kind, warmup=20), 5) == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_a_run_that_ends_before_its_warmup_says_so(steps: int, warmup: int) -> None:
    run = Run.load(overrides=[f"train.steps={steps}", f"schedule.warmup_steps={warmup}"])
    note = warmup_warning(run)
    assert (note is not None) == (warmup > steps)
    assert note is None or f"schedule.warmup_steps = {warmup}" in note


def test_the_highest_rate_of_a_warmup_that_does_not_end_is_named() -> None:
    run = Run.load(overrides=["train.steps=5", "schedule.warmup_steps=20", "optimizer.learning_rate=0.004"])
    assert "never reaches 0.004; the highest is 0.001" in str(warmup_warning(run))
