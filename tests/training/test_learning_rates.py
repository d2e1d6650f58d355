"""The rates of an optimizer's groups: in proportion to the schedule, or the user's own."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, lr_scheduler

from fullshard.errors import CheckpointError, TrainError
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import ScheduleSection
from fullshard.training.learning_rates import (
    describe_groups,
    rates_set_by_others,
    restore_rates_set_by_others,
    set_learning_rates,
    warn_of_unused_settings,
    warn_that_schedule_multiplies_rates,
)
from fullshard.training.loop import train
from fullshard.training.schedule import learning_rate_factor, warmup_warning
from fullshard.training.state import TrainState
from tests.training.runs import local_bits, mean_square, run_of, sharded

FALLING = run_of("schedule.kind=linear", "schedule.warmup_steps=2")


def factor(step: int) -> float:
    return learning_rate_factor(FALLING.schedule, step=step, steps=6)


def two_groups(*rates: Any) -> tuple[nn.Module, SGD]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model, rates, strict=True)]
    return model, SGD(groups, lr=1e-2)


def rates_of_steps(optimizer: torch.optim.Optimizer, steps: range, run: Run = FALLING) -> list[list[float]]:
    return [set_learning_rates(optimizer, run, step=step) for step in steps]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_rate_of_each_group_is_multiplied_by_the_schedule(kind: Any) -> None:
    _, optimizer = two_groups(kind(0.5), kind(0.0))
    for step in range(6):
        assert set_learning_rates(optimizer, FALLING, step=step) == pytest.approx([0.5 * factor(step), 0])
    assert type(optimizer.param_groups[0]["lr"]) is type(kind(0.5))


def test_groups_that_share_one_rate_tensor_follow_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": part.parameters()} for part in model]
    optimizer = AdamW(groups, lr=torch.tensor(0.5), fused=True)
    for step in range(6):
        assert set_learning_rates(optimizer, FALLING, step=step) == pytest.approx([0.5 * factor(step)] * 2)


def test_group_that_is_added_later_keeps_its_rate() -> None:
    _, optimizer = two_groups(0.5, 0.1)
    rates_of_steps(optimizer, range(3))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.3})
    assert set_learning_rates(optimizer, FALLING, step=3)[2] == 0.3 * factor(3)


def test_groups_are_described_with_the_rate_of_the_next_step_and_that_before_the_schedule() -> None:
    model, optimizer = two_groups(0.5, 0.25)
    assert describe_groups(model, optimizer) is None  # the schedule is not known yet
    for step in range(4):
        set_learning_rates(optimizer, FALLING, step=step)
        groups: Any = describe_groups(model, optimizer)
        assert [(one["lr"], one["initial_lr"]) for one in groups] == [
            (base * factor(step + 1), base) for base in (0.5, 0.25)
        ]
    assert [one["params"] for one in groups] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    optimizer.param_groups[0]["lr"] = 0.125  # from here on, the loop's own
    optimizer.param_groups[0]["growth"] = float("inf")  # a manifest could not hold it
    groups = describe_groups(model, optimizer)
    assert (groups[0]["lr"], groups[0]["initial_lr"], groups[0]["momentum"]) == (0.125, 0.125, 0)
    assert "growth" not in groups[0]
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    groups = describe_groups(model, optimizer)
    assert [(one["lr"], one["initial_lr"]) for one in groups] == [
        (pytest.approx(0.0125), 0.125),
        (pytest.approx(0.025 * factor(3)), pytest.approx(0.25 * factor(3))),
    ]


def test_a_group_at_the_rate_of_the_settings_follows_them() -> None:
    _, optimizer = two_groups(1e-2, 0.5)
    rates_of_steps(optimizer, range(3))
    later = FALLING.with_overrides(["optimizer.learning_rate=1e-3"])
    assert set_learning_rates(optimizer, later, step=3) == [1e-3 * factor(3), 0.5 * factor(3)]


def test_a_rate_that_the_loop_sets_is_left_alone_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = two_groups(0.5, 0.1)
    rates_of_steps(optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.2
    assert rates_of_steps(optimizer, range(3, 6)) == [[0.2, 0.1 * factor(step)] for step in (3, 4, 5)]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["from step 4"]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 9),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9),
    ],
)
def test_the_rates_of_a_torch_scheduler_are_left_alone(make: Any) -> None:
    alone, (_, optimizer) = two_groups(0.5, 0.1)[1], two_groups(0.5, 0.1)
    expected, given = make(alone), make(optimizer)
    for step in range(6):
        assert set_learning_rates(optimizer, FALLING, step=step) == expected.get_last_lr()
        for scheduler in (expected, given):
            scheduler.optimizer.step()
            scheduler.step()


def test_schedule_that_multiplies_the_users_rates_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """ReduceLROnPlateau is not seen before it reduces a rate, which then is left alone."""
    _, optimizer = two_groups(0.5, 0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    warn_that_schedule_multiplies_rates(
        optimizer, run_of("schedule.kind=constant", "schedule.warmup_steps=0")
    )
    assert not caplog.records
    warn_that_schedule_multiplies_rates(optimizer, FALLING)
    assert "multiplies the optimizer's learning rates (0.5, 0.1)" in caplog.text
    set_learning_rates(optimizer, FALLING, step=0)
    for _ in range(2):
        scheduler.step(1.0)
    assert set_learning_rates(optimizer, FALLING, step=1) == pytest.approx([0.025, 0.005])
    assert "0.025 in place of 0.25, 0.005 in place of 0.05" in caplog.text


def test_an_optimizer_without_a_rate_is_left_alone() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor of transformers, which chooses it itself
    assert set_learning_rates(optimizer, FALLING, step=3) == []
    assert optimizer.param_groups[0]["lr"] is None


def test_an_optimizer_loaded_from_a_state_dict_continues_the_schedule() -> None:
    first, second = two_groups(0.5, 1e-2)[1], two_groups(7.0, 8.0)[1]
    rates_of_steps(first, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert rates_of_steps(second, range(3, 6)) == rates_of_steps(first, range(3, 6))


def test_a_checkpoint_has_the_rates_that_others_set_for_any_grouping() -> None:
    model, optimizer = two_groups(0.5, 0.1)
    set_learning_rates(optimizer, FALLING, step=0)
    optimizer.param_groups[1]["lr"] = 0.7
    set_learning_rates(optimizer, FALLING, step=1)
    saved = rates_set_by_others(model, optimizer)
    assert saved == {"1.weight": [0.7, None], "1.bias": [0.7, None]}

    other = SGD([{"params": [one], "lr": 0.5} for one in model.parameters()])
    restore_rates_set_by_others(model, other, saved=saved)
    assert set_learning_rates(other, FALLING, step=2) == [0.5 * factor(2), 0.5 * factor(2), 0.7, 0.7]
    with pytest.raises(CheckpointError, match="several learning rates"):
        restore_rates_set_by_others(model, SGD(model.parameters()), saved=saved)


def test_a_checkpoint_from_before_the_loop_set_a_rate_returns_to_the_schedule() -> None:
    model, optimizer = two_groups(0.5, 1e-2)
    set_learning_rates(optimizer, FALLING, step=0)
    saved = rates_set_by_others(model, optimizer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.7
    set_learning_rates(optimizer, FALLING, step=1)
    restore_rates_set_by_others(model, optimizer, saved=saved)
    assert set_learning_rates(optimizer, FALLING, step=1) == [0.5 * factor(1), 1e-2 * factor(1)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["optimizer.learning_rate=0.2", "optimizer.betas=[0.5,0.6]"], ("learning_rate = 0.2", "betas")),
        (["optimizer.learning_rate=0.1", "optimizer.weight_decay=0.01", "optimizer.betas=[0.9,0.999]"], ()),
    ],
)
def test_settings_without_effect_on_the_optimizer_are_logged(
    settings: list[str], expected: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, run = AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1)), run_of(*settings)
    warn_of_unused_settings(optimizer, run.optimizer)
    set_learning_rates(optimizer, run, step=0)
    assert all(f"optimizer.{text}" in caplog.text for text in expected)
    assert len(caplog.records) == bool(expected)
    adafactor = Adafactor([nn.Parameter(torch.ones(2))], eps=(None, 1e-3))
    warn_of_unused_settings(adafactor, run_of("optimizer.eps=1e-4").optimizer)
    assert "optimizer.eps" in caplog.text
    sgd = SGD([nn.Parameter(torch.ones(2))], lr=3e-3)
    warn_of_unused_settings(
        sgd, run_of("optimizer.betas=[0.5, 0.5]", "optimizer.learning_rate=3e-3").optimizer
    )
    assert "optimizer.betas = (0.5, 0.5), but SGD has no betas" in caplog.text


# On ranks

PATHS = (("optimizer.name=sgd",), ("offload.tier=optimizer:cpu",), ("precision.mode=bf16_pure",))


def moved(*more: str) -> set[str]:
    """Parameters that three steps change, if the rate of the first group, the matrices, is 0."""
    state, plan = sharded(run_of("train.steps=3", *more))
    state.optimizer.param_groups[0]["lr"] = 0.0
    before = local_bits(state)
    list(train(state, plan, loss=mean_square))
    return {name for name, bits in local_bits(state).items() if not torch.equal(bits, before.get(name, bits))}


def moved_on_each_path() -> list[set[str]]:
    return [moved(*path) for path in PATHS]


def test_a_group_of_rate_zero_stays_on_every_path_of_the_update(ranks: Any) -> None:
    for names in ranks(1).run(moved_on_each_path)[0]:
        assert {name for name in names if name.startswith("model.")} == {
            *(f"model.layers.{i}.linear.bias" for i in range(3)),
            "model.head.bias",
        }


def train_with_rates_of_one_rank() -> None:
    state, plan = sharded(run_of())
    for step in train(state, plan, loss=mean_square):
        if step.index == 2 and torch.distributed.get_rank() == 1:
            state.optimizer.param_groups[0]["lr"] = 0.1


def test_rates_that_differ_between_ranks_are_refused_on_all(ranks: Any) -> None:
    with pytest.raises(TrainError, match=r"\(step 3\): its learning rates"):
        ranks(2).run(train_with_rates_of_one_rank)


def restored_rates(saves: bool, path: str) -> list[float]:
    from fullshard.checkpoint.load import load
    from fullshard.checkpoint.save import save

    state, plan = sharded(run_of("optimizer.name=sgd"))
    scheduler = lr_scheduler.ExponentialLR(state.optimizer, 0.5)
    if not saves:
        load(state, path)
    found = list[float]()
    for step in train(state, plan, loss=mean_square):
        found.append(step.learning_rate)
        scheduler.step()
        if saves and step.index == 3:
            save(state, path, plan=plan)
    return found


def test_a_resumed_run_has_the_rates_of_a_scheduler(ranks: Any, tmp_path: Any) -> None:
    whole = ranks(2).run(restored_rates, True, str(tmp_path / "saved"))
    assert whole == [pytest.approx([1e-2 * 0.5**i for i in range(6)])] * 2
    assert ranks(1).run(restored_rates, False, str(tmp_path / "saved"))[0] == pytest.approx(whole[0][3:])


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps its count of steps and a step size in its groups, as ScheduleFree and Prodigy do."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "d": torch.tensor(0.5), "decay": 0.0, **settings})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 2


def test_state_in_an_optimizers_groups_is_restored_and_settings_are_not() -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model, CountingOptimizer(model.parameters()))
    state.optimizer.step()
    saved = state.values()
    resumed = TrainState(model, CountingOptimizer(model.parameters(), decay=0.3))
    resumed.load_values(saved, {})
    [group] = resumed.optimizer.param_groups
    assert (group["k"], group["d"].item(), group["decay"]) == (1, 1.0, 0.3)
    resumed.optimizer.step()
    resumed.load_values(TrainState(model, CountingOptimizer(model.parameters())).values(), {})
    assert (group["k"], group["d"].item()) == (0, 0.5)
    resumed.load_values(saved, {})
    resumed.optimizer.step()
    assert resumed.values()["optimizer_groups"] == {"weight": {"k": 2, "d": 2.0}}


def one_cycle(betas: Any) -> tuple[TrainState, Any]:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=0.02, betas=betas)
    return TrainState(model, optimizer), optimizer.param_groups[0]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_betas_are_restored_only_if_a_scheduler_changed_them(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state, group = one_cycle((kind(0.9), kind(0.5)))
    unchanged = state.values()
    scheduler = lr_scheduler.OneCycleLR(state.optimizer, max_lr=0.05, total_steps=10)
    state.optimizer.step()
    scheduler.step()
    resumed, restored = one_cycle((0.8, 0.25))
    resumed.load_values(unchanged, {})
    assert restored["betas"] == (0.8, 0.25)
    assert not caplog.messages
    resumed.load_values(state.values(), {})
    assert restored["betas"] == (group["betas"][0], 0.5)
    assert group["betas"][0] not in (0.8, 0.9)
    assert f"betas [0.8, 0.25] -> {list(restored['betas'])}" in caplog.text
    assert list(state.values()["optimizer_groups"].values()) == list(
        resumed.values()["optimizer_groups"].values()
    )


# The schedule #
DECAYING = ("cosine", "linear", "wsd")
KINDS = (*DECAYING, "constant")


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
def test_last_step_and_those_beyond_are_at_the_final_ratio(section: ScheduleSection, steps: int) -> None:
    steps += section.warmup_steps
    end = 1.0 if section.kind == "constant" else section.min_lr_ratio
    assert rates(section, steps)[-1] == pytest.approx(end)
    assert learning_rate_factor(section, step=steps + 5, steps=steps) == pytest.approx(end)


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


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_warmup_longer_than_the_run_is_logged(steps: int, warmup: int) -> None:
    run = Run.load(overrides=[f"train.steps={steps}", f"schedule.warmup_steps={warmup}"])
    note = warmup_warning(run)
    assert (note is not None) == (warmup > steps)
    assert note is None or f"schedule.warmup_steps = {warmup}" in note


def test_the_highest_rate_of_a_warmup_that_does_not_end_is_named() -> None:
    run = Run.load(overrides=["train.steps=5", "schedule.warmup_steps=20", "optimizer.learning_rate=0.004"])
    assert "never reaches 0.004; the highest is 0.001" in str(warmup_warning(run))
