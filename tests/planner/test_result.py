"""The largest microbatch and sequence: each with the next one failing."""

from dataclasses import dataclass, replace

import pytest

from fullshard.errors import PlanError
from fullshard.planner import result
from fullshard.planner.result import PlanRequest, plan_largest_input
from fullshard.planner.search.search import search
from fullshard.planner.target import ModelToPlan
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, decoder_spec, run_for


@dataclass(frozen=True)
class DecoderTarget(ModelToPlan):
    """A target that needs no trace."""

    def describe_model(self, run: Run, hardware: Hardware) -> ModelSpec:
        return decoder_spec(replace(LLAMA_8B, sequence=run.data.sequence_length))


def question(*settings: str, gib: int = 80) -> PlanRequest:
    hardware = hardware_of(1, 8, gib=gib).model_copy(update={"host_bytes_per_second": 2e10})
    return PlanRequest(DecoderTarget("8B"), run_for(LLAMA_8B, *settings), hardware, decoder_spec(LLAMA_8B))


@pytest.mark.parametrize("pin", ["offload.tier=auto", "offload.tier=params+optimizer:cpu"])
def test_largest_microbatch_fits_and_the_next_does_not(pin: str):
    asked = question("train.global_batch=512", pin)
    found = plan_largest_input(asked, "microbatch")
    assert found.largest == ("microbatch", found.best.microbatch)
    assert found.best.run.offload.offloads_optimizer == (pin != "offload.tier=auto")
    run, next_one = found.best.run, 2 * found.best.microbatch
    if next_one <= 512 // 8:
        train = run.train.model_copy(update={"microbatch": next_one, "gradient_sync": "auto"})
        pinned = asked.asked.model_copy(update={"train": train, "offload": run.offload})
        assert search(asked.spec, asked.hardware, pinned).best is None


def test_the_largest_sequence_fits_and_the_next_does_not():
    asked = question("train.global_batch=8", "offload.tier=none")
    found = plan_largest_input(asked, "sequence")
    size = found.best.run.data.sequence_length
    assert found.largest == ("sequence", size)
    longer = result.LENGTHS[result.LENGTHS.index(size) + 1]
    settings = ("train.global_batch=8", "offload.tier=none", f"data.sequence_length={longer}")
    run = run_for(replace(LLAMA_8B, sequence=longer), *settings)
    assert search(asked.subject.describe_model(run, asked.hardware), asked.hardware, run).best is None


@pytest.mark.parametrize("what", ["microbatch", "sequence"])
def test_a_model_that_never_fits_has_no_largest_input(what: str):
    with pytest.raises(PlanError, match=f"no {what} fits"):
        plan_largest_input(question("train.global_batch=8", gib=4), what)  # type: ignore[arg-type]
