"""Few of the repeated blocks are kept, also behind other ones; compiled ones are traced if they differ."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import next_token_loss
from fullshard.parallel.units import find_recompute_and_compile_blocks, find_units
from fullshard.planner.describe.describe import describe
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.describe.extrapolation import BlockTruncation, truncate_repeated_blocks
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.families import MIXTURES
from tests.fakes.hardware import hardware_of
from tests.fakes.models import keep_blocks_apart
from tests.fakes.specs import phases_with_kernels


class Stack(nn.Module):
    """Blocks of these widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for width in widths)


def shorten(widths: list[int], *settings: str) -> tuple[Stack, BlockTruncation]:
    model, run = Stack(widths), Run.load(overrides=settings)
    units = find_units(model, run.sharding.units)
    blocks = find_recompute_and_compile_blocks(model, units=units)
    plan = Plan.from_run(run, world_size=1)
    return model, truncate_repeated_blocks(model, units, blocks=blocks, plan=plan)


@pytest.mark.parametrize(
    ("widths", "mode", "kept", "times"),
    [
        ([4] * 12, "none", 4, 9),
        ([8, 8, 8] + [4] * 9, "none", 7, 6),
        ([8] + [4] * 11, "none", 4, 9),
        ([8, 4] * 6, "none", 8, 3),
        ([4, 8, 4], "none", 3, 0),
    ],
)
def test_few_repeated_blocks_are_kept(widths: list[int], mode: str, kept: int, times: int) -> None:
    model, found = shorten(widths, f"recompute.mode={mode}")
    assert len(model.blocks) == kept
    assert [one.times for one in found.repeats] == ([times] if times else [])


@pytest.mark.parametrize(
    ("widths", "first", "kept", "times", "border"),
    [
        ([4] * 14, 6, (4, 4), [3, 5], 0),
        ([8, 8] + [4] * 12, 7, (6, 4), [2, 4], 0),
        ([8, 4] * 10, 10, (8, 8), [2, 2], 0),
        ([4] * 8 + [8] * 8, 8, (4, 4), [5, 5], None),  # others follow
        ([4] * 12, 2, (2, 4), [7], None),
    ],
)
def test_recomputed_first_blocks_are_truncated_apart(
    widths: list[int], first: int, kept: tuple[int, int], times: list[int], border: int | None
) -> None:
    model, found = shorten(widths, "recompute.mode=full", f"recompute.blocks={first}")
    assert (found.recomputed, len(model.blocks)) == (kept[0], sum(kept))
    assert ([one.times for one in found.repeats], found.border) == (times, border)


class Chain(Stack):
    """Blocks that run one after another."""

    def __init__(self) -> None:
        super().__init__([8] * 11)
        for block in self.blocks:
            block.extend([nn.Tanh(), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("model.layers=11", "model.vocabulary=16"), marks=pytest.mark.long),
        pytest.param(("model.layers=11", "model.vocabulary=2048"), marks=pytest.mark.long),
        pytest.param(("model.layers=11", "run.compile=true"), marks=pytest.mark.long),
    ],
)
def test_trace_of_half_recomputed_blocks_predicts_other_counts(settings: tuple[str, ...]) -> None:
    """The models are a chain of small blocks, and decoders whose peak is in backward or at the loss."""
    pins = ("recompute.mode=full", "precision.mode=bf16", "train.microbatch=2", "train.global_batch=16")
    run = Run.load(overrides=["data.sequence_length=16", *pins, *settings])
    device = "cuda" if run.run.compile is True else "cpu"

    def described(blocks: int, *, apart: bool) -> tuple[ModelSpec, Run]:
        own = run.with_overrides([f"recompute.blocks={blocks}"])
        with torch.device("meta"):
            model = DecoderModel(own.decoder_config) if settings else Chain()
        if apart:
            keep_blocks_apart(model.blocks)
        if settings:
            return describe(model, own, loss=next_token_loss, device_type=device), own
        batch = torch.empty(2, 16, 8, device="meta")
        return describe(model, own, loss=lambda model, x: model(x).sum(), batch=batch), own

    (short, _), (whole, asked) = described(5, apart=False), described(6, apart=True)
    assert list(short.traces[0].recomputed_block_counts()) == [4, 5, 6, 7]
    for overrides in ([], ["sharding.strategy=zero1"]):
        plan = Plan.from_run(asked.with_overrides(overrides), world_size=4)
        assert peak_bytes(short, plan) == peak_bytes(whole, plan)
        ours, theirs = (StepTimePredictor(one, hardware_of(1, 4)) for one in (short, whole))
        assert ours.sum_phase_ticks(plan) == theirs.sum_phase_ticks(plan)


def mixture_run(name: str, directory: Path, *overrides: str, **sizes: int) -> Run:
    path = directory / "config.json"
    path.write_text(json.dumps(MIXTURES[name] | sizes))
    fixed = ["data.sequence_length=16", "precision.mode=bf16", "run.device=cuda"]
    return Run.load(overrides=[f"model.hf={json.dumps(str(path))}", *fixed, *overrides])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compile_auto_and_true_describe_equal_compiled_expert_blocks(mode: str, tmp_path: Path) -> None:
    run = mixture_run("granitemoe", tmp_path, f"recompute.mode={mode}")
    both = describe_run(run.with_overrides(["run.compile=auto"]), "cuda", cached=False)
    alone = describe_run(run.with_overrides(["run.compile=true"]), "cuda", cached=False)
    derived = [trace for trace in both.traces if trace.compiled]
    assert len(derived) == len(alone.traces)
    for one, other in zip(derived, alone.traces, strict=True):
        assert phases_with_kernels(both, one) == phases_with_kernels(alone, other)
