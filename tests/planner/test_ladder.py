"""The ladder: every rung is planned on top of those below it, or has a reason, and the rest do without."""

from dataclasses import dataclass, replace

import pytest

from fullshard.errors import MissingExtraError, SpecError
from fullshard.planner.ladder import LADDER, check_rungs_are_open, plan_ladder
from fullshard.planner.result import PlanRequest
from fullshard.planner.search.search import search
from fullshard.planner.target import PlanTarget
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for

RUN = run_for(LLAMA_8B, "train.global_batch=16")
SPEC = decoder_spec(LLAMA_8B)


@dataclass(frozen=True)
class DecoderTarget(PlanTarget):
    """A target that needs no trace. `missing`: a value of `run.compile` that the installation cannot do."""

    missing: object = None

    def describe_model(self, run: Run, hardware: Hardware) -> ModelSpec:
        if self.missing is not None and run.run.compile == self.missing:
            raise MissingExtraError("hf", package="transformers", needed_for="this model")
        return replace_precision(run)


def replace_precision(run: Run) -> ModelSpec:
    return decoder_spec(replace(LLAMA_8B, precision=run.precision.mode), compiled=True)


def question(hardware: Hardware, **fields: object) -> PlanRequest:
    return PlanRequest(DecoderTarget("a decoder", **fields), RUN, hardware, spec=SPEC)  # type: ignore[arg-type]


def test_each_rung_is_the_fastest_plan_with_the_settings_of_all_below() -> None:
    run, hardware = RUN, hardware_of(1, 8)
    rungs = {rung.name: rung for rung in plan_ladder(question(hardware))}
    assert list(rungs) == [rung.name for rung in LADDER]
    for rung in LADDER:
        planned = rungs[rung.name]
        if planned.plan is None:
            assert planned.reason
            continue
        assert not planned.reason or rung.unpredicted
        run = run.with_overrides(rung.settings)
        assert planned.plan == search(replace_precision(run), hardware, run).best
    assert rungs["eager"].plan != rungs["compile"].plan


def test_the_cpu_climbs_what_it_can() -> None:
    missing = [rung for rung in plan_ladder(question(cpu_of(8))) if rung.plan is None]
    assert [rung.name for rung in missing] == ["segments", "fp8"]
    assert all(rung.reason for rung in missing)


def test_rungs_that_cannot_be_climbed_do_not_hold_up_the_others() -> None:
    rungs = {rung.name: rung for rung in plan_ladder(question(hardware_of(1, 8), missing=True))}
    assert "transformers" in rungs["compile"].reason
    above = rungs["chunked loss"].plan
    assert above is None or above.run.run.compile is False


def test_a_ladder_on_which_nothing_fits_has_reasons_only() -> None:
    rungs = plan_ladder(question(hardware_of(1, 1, gib=8)))
    assert all(rung.plan is None for rung in rungs)
    assert "more per rank" in rungs[0].reason


def test_a_saved_spec_has_no_ladder() -> None:
    with pytest.raises(SpecError, match="needs the model itself"):
        plan_ladder(PlanRequest(PlanTarget("saved", spec=SPEC), RUN, hardware_of(), spec=SPEC))


@pytest.mark.parametrize("setting", [one for rung in LADDER[:-1] for one in rung.settings])
def test_a_setting_of_a_rung_is_not_the_users(setting: str) -> None:
    with pytest.raises(SpecError, match="sets .* itself"):
        check_rungs_are_open(["train.steps=3", setting])


def test_other_settings_are_the_users() -> None:
    check_rungs_are_open(["train.steps=3", "precision.mode=bf16_reduce"])
