"""Two models: losses against a frozen model train as they do unsharded; adapters can be switched off."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.data.build import build_data
from fullshard.errors import TrainError
from fullshard.models.adapters import adapters_off, insert_adapters
from fullshard.models.decoder import DecoderModel
from fullshard.observe.memory import measure_peak_memory
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.training.runs import whole

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, RATE, FROZEN_SEED = 2, 0.5, 7
KINDS = ("dpo", "distill")
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")


def run_of(strategy: str = "full_shard") -> Run:
    return Run.load(
        overrides=[
            *runpy.run_path(str(EXAMPLES / "dpo.py"))["SETTINGS"],
            *("model.vocabulary=128", "model.layers=2", "model.d_model=16", "model.d_ff=24", "model.heads=2"),
            *("train.global_batch=12", "train.microbatch=2", f"train.steps={STEPS}"),
            *("optimizer.name=sgd", f"optimizer.learning_rate={RATE}", "optimizer.weight_decay=0"),
            *("optimizer.clip_norm=0", "schedule.kind=constant", "schedule.warmup_steps=0"),
            *("precision.mode=fp32", f"sharding.strategy={strategy}"),
        ]
    )


def example(kind: str, run: Run) -> tuple[Callable[..., Any], Callable[[nn.Module, Any], Any], Any]:
    """The example's class of both models, its loss on them, and batches for it."""
    program = runpy.run_path(str(EXAMPLES / f"{kind}.py"))

    def loss(both: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        half = run.data.row_length
        return both(batch if kind == "dpo" else {key: one.view(-1, half) for key, one in batch.items()})

    return program["Both"], loss, build_data(run)


def built(run: Run, *, seed: int | None = None) -> nn.Module:
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    return model if seed is None else materialize(model, seed=seed)


def trained_sharded(kind: str, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    run = run_of(strategy)
    plan = Plan.from_run(run, world_size=dist.get_world_size(), device="cpu")
    make_both, loss, pairs = example(kind, run)
    both = shard(make_both(built(run, seed=run.run.seed), built(run, seed=FROZEN_SEED)), plan)
    state = TrainState(both, build_optimizer(both, plan), data=pairs, saved="trained")
    losses = [step.loss for step in train(state, plan, loss=loss)]
    assert not [name for name in state.tensors() if "reference" in name or "teacher" in name]
    return losses, whole(both)


def trained_unsharded(kind: str, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters with torch alone: SGD on the mean over a step's items."""
    run = run_of()
    plan = Plan.from_run(run, world_size=ranks, device="cpu")
    make_both, loss, pairs = example(kind, run)
    both = make_both(built(run, seed=run.run.seed), built(run, seed=FROZEN_SEED))
    optimizer, losses = torch.optim.SGD(both.model.parameters(), lr=RATE), list[float]()
    for step in range(STEPS):
        batches = [one for rank in range(ranks) for one in pairs.microbatches(step, rank=rank, plan=plan)]
        sums = [loss(both, batch) for batch in batches]
        mean = torch.stack([total for total, _ in sums]).sum() / sum(int(count) for _, count in sums)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses, {name: one.detach() for name, one in both.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_loss_against_a_frozen_model_trains_as_unsharded(ranks: Any, kind: str, count: int) -> None:
    expected, parameters = trained_unsharded(kind, count)
    for strategy in STRATEGIES:
        for losses, own in ranks(count).run(trained_sharded, kind, strategy):
            assert losses == pytest.approx(expected, rel=1e-5)
            for name, one in own.items():
                torch.testing.assert_close(one, parameters[name], rtol=1e-4, atol=1e-6)


def planned_and_measured(kind: str, *settings: str) -> tuple[int, int]:
    """Bytes of the peak of a step."""
    run = run_of().with_overrides(["model.d_model=128", "model.d_ff=256", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size(), device="cpu")
    make_both, loss, pairs = example(kind, run)
    both = make_both(built(run), built(run))
    batch = next(pairs.microbatches(0, rank=0, plan=plan))
    spec = describe(both, run, loss=loss, batch=batch, device_type="cpu")
    shard(both, plan)
    state = TrainState(both, build_optimizer(both, plan), data=pairs, saved="trained")
    steps = train(state, plan, loss=loss)
    next(steps)
    with measure_peak_memory(torch.device("cpu"), model=both, optimizer=state.optimizer) as peak:
        next(steps)
    assert peak.parts is not None
    return peak_bytes(spec, plan).total, sum(peak.parts.parts().values())


PLANNED = [("dpo", ()), *(("dpo", (f"sharding.strategy={one}",)) for one in STRATEGIES[1:])]
PLANNED += [("distill", (f"sharding.strategy={one}",)) for one in ("full_shard", "shard_grad_op", "zero1")]
PLANNED += [("distill", ("recompute.mode=full",)), ("dpo", ("precision.mode=bf16", "model.layers=5"))]
PLANNED += [("dpo", ("train.microbatch=3", "model.d_model=32")), ("distill", ("precision.mode=bf16",))]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [pytest.param(*one, marks=pytest.mark.long if place else ()) for place, one in enumerate(PLANNED)],
)
def test_two_models_take_the_memory_that_is_planned(ranks: Any, kind: str, settings: tuple[str, ...]) -> None:
    for planned, measured in ranks(2).run(planned_and_measured, kind, *settings):
        assert planned == pytest.approx(measured, rel=0.01)


def adapted(*settings: str) -> tuple[nn.Module, nn.Module]:
    """A decoder, and the same with random adapters."""
    run = run_of().with_overrides(["adapter.rank=2", *settings])
    base = built(run, seed=1)
    with torch.device("meta"):
        model = insert_adapters(DecoderModel(run.decoder_config), run.adapter)
    model = materialize(model, seed=1)
    values = {name.replace(".base_layer.", "."): one for name, one in model.named_parameters()}
    with torch.no_grad():
        for name, one in base.named_parameters():
            values[name].copy_(one)
        for name, one in values.items():
            if ".lora_" in name:
                one.normal_()
    return base, model


def test_adapters_are_off_within_the_context_and_on_behind_it() -> None:
    base, model = adapted()
    tokens = torch.arange(24).view(1, 24)
    with torch.no_grad():
        on = model(tokens)
        with adapters_off(model):
            off = model(tokens)
        assert torch.equal(off, base(tokens))
        assert torch.equal(model(tokens), on)
    assert not torch.allclose(on, off)
    assert all(one.requires_grad == (".lora_" in name) for name, one in model.named_parameters())


@pytest.mark.parametrize("settings", [None, 'adapter.trained=["norm"]'])
def test_a_model_whose_base_is_trained_or_that_has_no_adapter_is_no_reference(settings: str | None) -> None:
    model = built(run_of(), seed=1) if settings is None else adapted(settings)[1]
    text = "no adapter" if settings is None else "trained beside them"
    with pytest.raises(TrainError, match=text), adapters_off(model):
        pass


def preference_with_adapters(tmp: str) -> list[float]:
    """Losses of two steps whose reference is the model without its adapters: -log 1/2 in the first."""
    run = run_of().with_overrides(["adapter.rank=2"])
    plan = Plan.from_run(run, world_size=dist.get_world_size(), device="cpu")
    program = runpy.run_path(str(EXAMPLES / "dpo.py"))
    with torch.device("meta"):
        model = insert_adapters(DecoderModel(run.decoder_config), run.adapter)
    shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=build_data(run))
    return [step.loss for step in train(state, plan, loss=program["loss_with_adapters"])]


def test_a_sharded_model_without_its_adapters_is_its_own_reference(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2).run(preference_with_adapters, str(tmp_path)):
        assert first == pytest.approx(0.693147, abs=1e-6)
        assert second < first
