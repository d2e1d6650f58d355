"""Specs for any sequence length follow exactly from those at a few lengths."""

import json
from collections.abc import Sequence

import pytest

import fullshard as fs
from bench.length_specs import describe_lengths
from fullshard.planner.describe import describe_run
from fullshard.planner.describe.sequence_lengths import derive_spec
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.model import ModelSpec
from fullshard.spec.run import Run

SIZES = ["model.layers=2", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.vocabulary=96"]
HARDWARE = hardware_on("8x8xH100")


def run_of(length: int, *overrides: str) -> Run:
    own = [f"data.sequence_length={length}", f"model.max_sequence={2 * length}", "train.global_batch=64"]
    return Run.load(overrides=[*SIZES, *own, "precision.mode=bf16", "run.compile=false", *overrides])


def derive(text: str, run: Run) -> ModelSpec | None:
    key = describe_run.build_spec_key(run, "cuda")
    assert key is not None
    return derive_spec(text, json.loads(key.settings))


@pytest.mark.parametrize(
    ("shared", "targets", "settings"),
    [
        (False, [(2048, 1), (99840, 1)], ["recompute.mode=full", "train.loss_chunk=2048"]),
        (True, [(1048576, 64)], ["recompute.mode=none"]),
        pytest.param(
            *(True, [(30720, 3), (65536, 8)], ["recompute.mode=selective", "sharding.tensor_parallel=2"]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_derived_spec_predicts_what_a_traced_one_does(
    shared: bool, targets: Sequence[tuple[int, int]], settings: list[str]
) -> None:
    """For several microbatches. Kernels that are equal only at this length are not merged."""
    text = describe_lengths(run_of(2048, *settings), "cuda", shared=shared)
    assert text is not None
    for length, ranks in targets:
        run = run_of(length, *settings, f"sharding.context_parallel={ranks}")
        derived, traced = derive(text, run), describe_run.describe_run(run, "cuda", cached=False)
        assert derived is not None
        others = {"kernels": (), "traces": ()}
        assert derived.model_copy(update=others) == traced.model_copy(update=others)
        for microbatch in (1, 2, 8):
            world = run.sharding.ranks_per_sequence * (64 // microbatch)
            own = run.with_overrides([f"train.microbatch={microbatch}", "sharding.strategy=full_shard"])
            plan = fs.Plan.from_run(own, world_size=world, device="cuda")
            one, other = (fs.predict(spec, plan, HARDWARE).prediction for spec in (derived, traced))
            assert one is not None
            assert other is not None
            assert one.memory == other.memory
            assert one.time.total == pytest.approx(other.time.total, rel=1e-3)


def test_short_and_unaligned_parts_of_a_sequence_are_traced() -> None:
    text = describe_lengths(run_of(2048, "recompute.mode=full"), "cuda", shared=False)
    assert text is not None
    assert derive(text, run_of(4096, "recompute.mode=full")) is not None
    assert derive(text, run_of(1024, "recompute.mode=full")) is None
    assert derive(text, run_of(4100, "recompute.mode=full")) is None


def test_operations_that_depend_on_the_length_derive_nothing() -> None:
    """With a loss whose logits are whole up to 64 MiB, and in chunks above."""
    run = run_of(2048, "recompute.mode=full", "model.vocabulary=4096")
    assert describe_lengths(run, "cuda", shared=False) is None
