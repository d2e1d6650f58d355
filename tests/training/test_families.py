"""Each model family trains sharded as it trains unsharded, and comes back from its checkpoint."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.errors import TraceError
from fullshard.models.build import build_model
from fullshard.models.loss import Loss, choose_loss
from fullshard.parallel.materialize import materialize
from fullshard.planner.describe.describe import describe
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.architectures import whole
from tests.fakes.architectures_hf import LENGTH
from tests.fakes.families import AUDIO, FAMILIES, MIXTURES, STATE_SPACE, VISION_LANGUAGE, batch_of_family

STEPS, RATE, MOMENTUM = 2, 0.1, 0.9
SETTINGS = (
    *("data.source=python", "data.factory=tests.models.own:Given", "sharding.strategy=full_shard"),
    *("precision.mode=fp32", f"train.steps={STEPS}", "train.global_batch=4", "train.microbatch=2"),
    *("optimizer.name=sgd", f"optimizer.learning_rate={RATE}"),
    *(f"optimizer.options={{momentum={MOMENTUM}}}", "optimizer.weight_decay=0"),
    *("optimizer.clip_norm=0", "schedule.kind=constant", "schedule.warmup_steps=0"),
)
KINDS = {
    "audio": list(AUDIO),
    "vision-language": list(VISION_LANGUAGE),
    "state-space": list(STATE_SPACE),
    "mixtures": list(MIXTURES),
    "others": [n for n in FAMILIES if n not in AUDIO | VISION_LANGUAGE | STATE_SPACE | MIXTURES],
}
SAMPLE = ("whisper", "qwen2_vl", "mamba", "gpt_oss")


def built(name: str, *settings: str) -> tuple[nn.Module, Run]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
        run = Run.load(overrides=[*SETTINGS, f"model.hf={directory}", *settings])
        return build_model(run), run


def of_transformers(name: str) -> Any:
    config = transformers.CONFIG_MAPPING[FAMILIES[name]["model_type"]].from_dict(FAMILIES[name])
    config.use_cache = False
    return getattr(transformers, FAMILIES[name]["architectures"][0])(config).train()


def batches(name: str, step: int) -> list[Any]:
    """One microbatch per rank."""
    return [batch_of_family(name, 10 * step + rank) for rank in range(dist.get_world_size())]


def losses_unsharded(name: str, plain: nn.Module, loss: Loss) -> list[float]:
    """Trains `plain` with torch alone. Returns the loss of each step."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=MOMENTUM)
    losses: list[float] = []
    for step in range(STEPS):
        results = [loss(plain, batch) for batch in batches(name, step)]
        sums = [one if isinstance(one, tuple) else (one, 1) for one in results]
        mean = sum(value for value, _ in sums) / sum(count for _, count in sums)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def local_tensors(state: TrainState) -> dict[str, Tensor]:
    held = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers()), **state.tensors()}
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in held.items()}


def check_family(name: str, directory: Path) -> None:
    """Two steps on these ranks equal two unsharded ones. A new model then loads their checkpoint."""
    plain = of_transformers(name)
    plain.load_state_dict(materialize(built(name)[0], seed=0).state_dict())
    expected = losses_unsharded(name, plain, choose_loss(built(name, "train.loss_chunk=0")[1], plain))
    model, run = built(name)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    loss, data = choose_loss(run, model), [batches(name, step)[dist.get_rank()] for step in range(STEPS)]
    shard(model, plan)
    state = TrainState(model, build_optimizer(model, plan), data=data)
    losses = [step.loss for step in train(state, plan, loss=loss)]
    assert losses == pytest.approx(expected, rel=1e-5)
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        error = (whole(sharded[key]) - parameter).norm()
        assert error <= 2e-4 * parameter.norm() + 1e-6, f"{key}: error {error} of {parameter.norm()}"
    save(state, directory / name, plan=plan)
    other, changed = built(name, "run.seed=1")
    plan = Plan.from_run(changed, world_size=dist.get_world_size())
    shard(other, plan)
    back = TrainState(other, build_optimizer(other, plan))
    load(back, directory / name)
    assert back.step == STEPS
    before, after = local_tensors(state), local_tensors(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def failures_of_families(names: Sequence[str], directory: Path) -> dict[str, str]:
    """Checks each family in one process group. Returns the errors of those that fail."""
    failures: dict[str, str] = {}
    for name in names:
        try:
            check_family(name, directory)
        except Exception as error:  # noqa: BLE001  # the family's name goes with it
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample"),
        *(pytest.param(names, id=kind, marks=pytest.mark.long) for kind, names in KINDS.items()),
    ],
)
def test_family_trains_as_unsharded_and_resumes(names: Sequence[str], ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(failures_of_families, names, tmp_path) == [{}, {}]


# Torch has no CTC loss for tensors without values.
NOT_DESCRIBED = {"wav2vec2", "hubert"}
# Described for the given microbatch only: patches are not rows of the batch, or states stay in modules.
DESCRIBED_FOR_ONE_MICROBATCH = {"qwen2_vl", "qwen2_5_vl", "mistral3", "recurrent_gemma"}


def described(name: str) -> str:
    model, run = built(name, "recompute.mode=none", f"data.sequence_length={LENGTH}")
    batch = batch_of_family(name, 0)
    try:
        spec = describe(model, Plan.from_run(run, world_size=2), loss=choose_loss(run, model), batch=batch)
    except TraceError:
        return "not"
    assert spec.numel == sum(parameter.numel() for parameter in model.parameters())
    return "any" if spec.traces[0].microbatch is None else "one"


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_described_for_any_microbatch_or_as_the_docs_say(name: str) -> None:
    expected = "not" if name in NOT_DESCRIBED else "one" if name in DESCRIBED_FOR_ONE_MICROBATCH else "any"
    assert described(name) == expected
