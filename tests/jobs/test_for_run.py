"""The plan that `fullshard train` runs: chosen where the run leaves it open, kept where it pins."""

import io
import os
import sys
import time
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.errors import CheckpointError, LaunchError, PlanError, SpecError
from fullshard.jobs.for_run import (
    fitting_settings_text_on_hardware,
    largest_fitting_predicted_bytes,
    planned_on_rank_zero,
    request_with_plan,
)
from fullshard.launch.detect import detect_hardware
from fullshard.launch.request import LaunchRequest
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.search.search import plan, search
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from fullshard.spec.run import Run
from tests.data.samples import texts_file
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import Shape, decoder_spec, run_for

SMALL = (
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.d_ff=32"),
    *("data.sequence_length=16", "train.global_batch=12", "run.device=cpu", "precision.mode=bf16"),
)


@pytest.fixture(autouse=True)
def no_hardware_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def request(*overrides: str) -> LaunchRequest:
    return LaunchRequest(run=Run.load(overrides=[*SMALL, *overrides]))


def planned(*overrides: str) -> Plan:
    plan = request_with_plan(request(*overrides)).plan
    assert plan is not None
    return plan


def test_open_settings_are_the_best_plan() -> None:
    run = request().run
    best = search(describe_run(run, "cpu"), detect_hardware("cpu", ranks=2), run).best
    assert planned() == best


def plan_of_ranks(settings: tuple[str, ...], own_path: str, leave_with: int | None) -> Any:
    """Returns the planned run, or (exit code, text of the error), and what was printed, on each rank."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "XDG_CONFIG_HOME": own_path}
    number = dist.get_rank()
    own = request(*settings, f"run.seed={number}", f"offload.path={own_path}/{number}")

    def make_plan() -> LaunchRequest:
        assert number == 0, "only rank 0 plans"
        if leave_with is not None:
            sys.exit(leave_with)
        return request_with_plan(own)

    with redirect_stderr(io.StringIO()) as printed:
        try:
            with planned_on_rank_zero(own, make_plan) as planned:
                assert planned.plan is not None
                assert planned.plan.run == planned.run
                return planned.plan, printed.getvalue()
        except (PlanError, LaunchError) as error:
            return error.exit_code, str(error)
        except SystemExit as left:
            return left.code, ""


def test_all_ranks_run_the_plan_of_rank_0_with_the_paths_of_their_nodes(ranks, tmp_path: Path) -> None:
    first, *others = ranks(3).run(plan_of_ranks, ("recompute.mode=none",), str(tmp_path), None)
    assert "not used" not in first[1]
    for number, (own, printed) in enumerate(others, 1):
        run = first[0].run.with_settings({"offload": {"path": f"{tmp_path}/{number}"}})
        assert own == first[0].model_copy(update={"run": run})
        unused = f"run.seed = {number} (used: 0)"
        assert printed == f"note: rank {number}: not used, because rank 0's hold: {unused}\n"


@pytest.mark.parametrize(
    ("settings", "leave_with", "expected"),
    [
        ("train.global_batch=13", None, (PlanError.exit_code, "13")),
        ("train.global_batch=12", 0, (LaunchError.exit_code, "sys.exit(0)")),
    ],
)
def test_whatever_ends_rank_0_while_it_plans_ends_all_ranks_with_one_text(
    settings: str, leave_with: int | None, expected: tuple[int, str], ranks, tmp_path: Path
) -> None:
    code, text = expected
    first, *others = ranks(3).run(plan_of_ranks, (settings,), str(tmp_path), leave_with)
    assert first[0] == code
    assert text in first[1]
    assert others == [(code, "")] * 2


def test_a_run_of_epochs_is_the_run_of_their_steps(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("some words " * 200)
    data = ("data.source=text", f'data.paths=["{tmp_path}/a.txt"]', f"data.cache={tmp_path}/cache")
    by_epochs = planned(*data, "train.epochs=3")
    steps = by_epochs.run.train.step_count
    assert f"sequences: train.steps = {steps}" in capsys.readouterr().err
    assert by_epochs == planned(*data, f"train.steps={steps}")


def step_count_planned_on_rank_zero(settings: tuple[str, ...], cache: str) -> int:
    """Returns the number of steps of a run, which rank 0 plans after others have tokenized the data."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    own = request(*settings, f"data.cache={cache}")

    def make_plan() -> LaunchRequest:
        while not [*Path(cache).glob("tokens-*")]:
            time.sleep(0.01)
        return request_with_plan(own, plain_defaults=True)

    with redirect_stderr(io.StringIO()), planned_on_rank_zero(own, make_plan) as planned:
        return planned.run.train.step_count


def test_other_ranks_tokenize_the_data_of_epochs_too(ranks, tmp_path: Path) -> None:
    path = texts_file(tmp_path / "a.jsonl", 100)
    data = ("data.source=jsonl", f'data.paths=["{path}"]', "train.epochs=3", "data.processes=1")
    first, other = ranks(2).run(step_count_planned_on_rank_zero, data, str(tmp_path / "cache"))
    assert first == other > 1


def test_settings_that_a_launcher_replaces_are_noted(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert planned("run.ranks=4", "run.restarts=3").world_size == 2
    noted = capsys.readouterr().err
    assert "run.ranks = 4 is not used: the launcher has set WORLD_SIZE = 2" in noted
    assert "run.restarts = 3 is not used" in noted


def test_a_setting_without_effect_is_noted_before_ranks_start(capsys) -> None:
    planned("precision.fp8_min_features=64")
    assert "note: precision.fp8_min_features = 64 has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["foo://bar", "s3://", "s3:///run", "s3:/bucket/run", "gs://bucket"])
def test_unusable_checkpoint_directory_is_refused(url: str) -> None:
    if url.startswith("gs:") and find_spec("gcsfs") is not None:
        pytest.skip("gcsfs is installed")
    with pytest.raises((CheckpointError, SpecError), match=url):
        planned(f"checkpoint.dir={url}", "train.loss=absent:loss")


def test_a_plan_that_is_given_is_only_predicted() -> None:
    run = request("sharding.strategy=full_shard").run
    given = Plan.from_run(run, world_size=2)
    found = request_with_plan(LaunchRequest(run=given.run, plan=given)).plan
    assert found is not None
    assert found.prediction is not None
    assert found.model_copy(update={"prediction": None}) == given


def test_a_run_whose_optimizer_state_is_unknown_gets_plain_defaults(capsys: Any) -> None:
    assert planned("optimizer.name=torch.optim.Adagrad").prediction is None
    assert capsys.readouterr().err.startswith("note: not planned, so with plain defaults: ")


def test_a_run_that_fits_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = detect_hardware("cpu", ranks=2)
    chip = hardware.chip.model_copy(update={"memory_bytes": 50_000})
    hardware.model_copy(update={"chip": chip}).save(tmp_path / "tiny.toml")
    monkeypatch.setenv("FULLSHARD_HARDWARE", str(tmp_path / "tiny.toml"))
    with pytest.raises(PlanError, match="no plan fits") as raised:
        request_with_plan(request("recompute.mode=none", "sharding.strategy=full_shard"))
    assert "closest: " in str(raised.value)
    assert "try: " in str(raised.value)


def test_a_run_that_cannot_be_laid_out_is_refused_before_ranks_start() -> None:
    with pytest.raises(PlanError, match=r"train.global_batch = 10 or 15"):
        request_with_plan(request("run.ranks=5"))
    of_four = Plan.from_run(request().run, world_size=4)
    with pytest.raises(PlanError, match="the plan is for 4 ranks"):
        request_with_plan(LaunchRequest(run=request("run.ranks=2").run, plan=of_four))


def test_settings_that_do_not_work_together_are_refused_before_ranks_start() -> None:
    styles = "sharding.tensor_parallel_styles={head='head'}"
    with pytest.raises(PlanError, match="do not work together"):
        request_with_plan(request("sharding.tensor_parallel=2", "sharding.expert_parallel=2", styles))


def test_unmeasured_drive_is_planned_without_its_time(capsys: Any) -> None:
    plan = planned("offload.tier=optimizer:nvme")
    assert plan.run.offload.tier == "optimizer:nvme"
    assert plan.prediction is not None
    assert not plan.prediction.has_complete_step_time
    said = capsys.readouterr().err
    assert said.startswith("note: how fast the drive is is not known")
    assert "try: fullshard calibrate --drive" in said


@pytest.mark.parametrize(
    "tier",
    [pytest.param("optimizer:cpu", marks=pytest.mark.long), "optimizer:nvme"]
    + [pytest.param("params+optimizer:nvme", marks=pytest.mark.long)],
)
def test_a_host_limit_that_no_plan_fits_is_refused_without_calibration(tier: str) -> None:
    with pytest.raises(PlanError, match="no plan fits 1000 B of host memory per rank"):
        # One recompute mode: each is traced by itself.
        request_with_plan(request(f"offload.tier={tier}", "offload.host_bytes=1000", "recompute.mode=none"))


def test_a_host_limit_is_refused_if_the_run_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.toml").write_text("ranks_per_node = 0", encoding="utf-8")
    monkeypatch.setenv("FULLSHARD_HARDWARE", str(tmp_path / "broken.toml"))
    assert planned("offload.tier=optimizer:cpu").prediction is None
    with pytest.raises(PlanError, match="cannot be held to"):
        request_with_plan(request("offload.tier=optimizer:cpu", "offload.host_bytes=100_000_000"))


def test_a_tier_of_another_optimizer_is_refused_before_ranks_start() -> None:
    for name in ("sgd", "torch.optim.Adagrad"):
        with pytest.raises(PlanError, match="only AdamW's state is kept outside"):
            request_with_plan(request("offload.tier=optimizer:cpu", f"optimizer.name={name}"))


BRANCHING = (
    *("model.python=tests.models.own:Branching", "train.loss=tests.models.own:square_loss"),
    *("data.source=python", "data.factory=tests.models.own:Given", "data.options.name=pyramid"),
    *("train.global_batch=12", "run.device=cpu"),
)


def test_undescribed_model_runs_with_plain_defaults(capsys: Any) -> None:
    run = Run.load(overrides=BRANCHING)
    plan = request_with_plan(LaunchRequest(run=run)).plan
    assert plan is not None
    assert plan.prediction is None
    said = capsys.readouterr().err
    assert "note: not planned, so with plain defaults: Branching cannot be described" in said
    assert "DataDependentOutputException" in said


def test_without_a_plan_the_model_is_built_but_not_traced(capsys: Any) -> None:
    plain = Run.load(overrides=[*BRANCHING, "run.ranks=2", "precision.mode=fp32"])
    assert request_with_plan(LaunchRequest(run=plain), plain_defaults=True).plan == Plan.from_run(
        plain, world_size=2
    )
    said = capsys.readouterr().err
    assert said == "note: the model is built without weights first, to check and plan the run\n"
    wrong = LaunchRequest(run=Run.load(overrides=[*BRANCHING, "model.python=tests.models.own:absent"]))
    with pytest.raises(SpecError, match="absent"):
        request_with_plan(wrong, plain_defaults=True)
    limited = request("offload.tier=optimizer:cpu", "offload.host_bytes=100_000_000")
    with pytest.raises(PlanError, match="cannot be held to"):
        request_with_plan(limited, plain_defaults=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("file", "lines"), [(Terminal(), 1), (io.StringIO(), 0)], ids=["terminal", "file"])
def test_tracing_is_announced_on_a_terminal_only(
    file: io.StringIO, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm")
    describe_run(request("recompute.mode=none").run, "cpu", cached=False)
    assert file.getvalue().count("planning: tracing DecoderModel") == lines
    assert file.getvalue().count("\n") == lines


SHAPE = Shape(layers=12, d_model=2048, d_ff=5632, vocabulary=32000, sequence=2048)
GIB = 1 << 30


def failure(*, held: int, requested: int | None) -> RunEvent:
    return RunEvent.now(
        "out_of_memory", attempt=1, details={"held_bytes": held, "requested_bytes": requested}
    )


def prediction_of(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def test_the_named_settings_need_less_than_the_rank_had():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    needed = prediction_of(failed).memory.total
    text = fitting_settings_text_on_hardware(
        spec, hardware, run=run, plan=failed, failures=[failure(held=needed // 2, requested=needed // 8)]
    )
    assert "(was " in text
    found = {change.split(" = ")[0] for change in text.partition(":")[0].split(", ")}
    assert found & {"train.microbatch", "recompute.mode", "sharding.strategy"}


def test_a_rank_that_needed_twice_the_plan_leaves_half_of_its_memory_to_plan_with():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    prediction = prediction_of(failed)
    total, beside = prediction.memory.total, prediction.required_device_bytes - prediction.memory.total
    less_available = failure(held=total // 2, requested=total // 4)
    assert largest_fitting_predicted_bytes(prediction, less_available) == total // 2 + beside
    twice_as_large = failure(held=total, requested=total)
    assert largest_fitting_predicted_bytes(prediction, twice_as_large) == pytest.approx(
        total // 2 + beside, abs=1
    )


@pytest.mark.parametrize(("held", "requested"), [(1 << 20, 1 << 60), (335, 1 << 40)])
def test_an_allocation_that_no_setting_shrinks_has_no_advice(held: int, requested: int):
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    failures = [failure(held=held, requested=requested)]
    assert fitting_settings_text_on_hardware(spec, hardware, run=run, plan=failed, failures=failures) is None


def test_where_no_open_setting_helps_the_pinned_one_is_named():
    pins = (
        "train.global_batch=64",
        "train.microbatch=8",
        "recompute.mode=none",
        "sharding.strategy=full_shard",
    )
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, *pins)
    failed = plan(spec, hardware, run)
    held = prediction_of(failed).memory.total // 2
    text = fitting_settings_text_on_hardware(
        spec, hardware, run=run, plan=failed, failures=[failure(held=held, requested=None)]
    )
    assert text.startswith("no plan of this run fits into the ")
    assert "train.microbatch" in text or "recompute.mode" in text
