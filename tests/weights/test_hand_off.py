"""Weights that are handed over from a sharded model are those of its export, in bounded buckets."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fullshard.checkpoint.save import save
from fullshard.errors import SpecError
from fullshard.models.build import build_model
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import export_hf
from fullshard.weights.hand_off import iterate_weights
from fullshard.weights.pretrained import load_pretrained
from tests.fakes.plans import plan_of
from tests.weights.hugging_face import hugging_face

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of much
BUCKET = 6_000


DTYPES = {"bf16": torch.bfloat16, "own": None}


def handed_over_and_exported(
    directory: Path, *settings: str
) -> tuple[dict[str, list[dict[str, Tensor]]], int]:
    """Buckets on this rank by dtype, and the bytes of the largest tensor. Rank 0 writes the exports."""
    plan = plan_of(dist.get_world_size(), *settings)
    is_pretrained = isinstance(plan.run.model, HuggingFaceModel)
    model = shard(build_model(plan.run), plan, init="none" if is_pretrained else None)
    if is_pretrained:
        load_pretrained(model, directory / "in", plan=plan)
    if not plan.run.offload.offloads_optimizer:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.ones_like(parameter) / 8)
    state = TrainState(model, build_optimizer(model, plan))
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    buckets = {
        key: list(iterate_weights(model, plan, bucket_bytes=BUCKET, dtype=dtype))
        for key, dtype in DTYPES.items()
    }
    own = dict(one for bucket in iterate_weights(model, plan, names="own") for one in bucket.items())
    assert own.keys() == {key.removeprefix("model.") for key in state.tensors() if key.startswith("model.")}
    assert all(own[key].shape == one.shape for key, one in model.named_parameters() if key in own)
    save(state, directory / "checkpoints", plan=plan)
    for key, dtype in DTYPES.items() if dist.get_rank() == 0 else ():
        export_hf(directory / "checkpoints", directory / key, dtype="bf16" if dtype else None)
    return buckets, largest


CASES = [
    pytest.param(2, "llama", (), marks=pytest.mark.long),
    (3, "mixtral", ("sharding.strategy=shard_grad_op",)),
    (2, "mixtral", ("adapter.rank=4", 'adapter.targets=["q_proj", "w1", "w2", "w3"]')),
    (2, "gpt2", ("adapter.rank=4", "adapter.alpha=6", 'adapter.targets=["c_attn", "c_proj"]')),
    (2, "llama", ("offload.tier=optimizer:cpu", "precision.mode=bf16")),
    pytest.param(2, "llama", ("sharding.tensor_parallel=2",), marks=pytest.mark.long),
    (2, "", ("model.tied=true",)),
]


@pytest.mark.parametrize(("count", "name", "settings"), CASES, ids=lambda one: str(one)[:40])
def test_the_buckets_together_are_the_export(
    ranks: Any, tmp_path: Path, count: int, name: str, settings: tuple[str, ...]
) -> None:
    if name:
        hugging_face(name, tmp_path / "in")
        settings = (f"model.hf={tmp_path / 'in'}", *settings)
    for by_dtype, largest in ranks(count).run(handed_over_and_exported, tmp_path, *settings):
        for key, buckets in by_dtype.items():
            exported = load_file(tmp_path / key / "model.safetensors")
            whole = {one: tensor for bucket in buckets for one, tensor in bucket.items()}
            assert sum(map(len, buckets)) == len(whole)
            assert whole.keys() == exported.keys()
            assert all(torch.equal(whole[one], exported[one]) for one in whole)
            assert all(whole[one].dtype == exported[one].dtype for one in whole)
            sizes = [sum(one.nbytes for one in bucket.values()) for bucket in buckets]
            assert len(sizes) > 1
            assert all(size <= BUCKET or len(one) == 1 for size, one in zip(sizes, buckets, strict=True))
            assert max(sizes) <= max(BUCKET, largest)


@pytest.mark.parametrize("wrong", [{"bucket_bytes": 0}, {"names": "vllm"}])
def test_impossible_buckets_are_refused_by_the_call(wrong: Any) -> None:
    with pytest.raises(SpecError, match=str(next(iter(wrong.values())))):
        iterate_weights(torch.nn.Linear(1, 1), plan_of(1), **wrong)


def test_a_part_of_an_offloaded_model_is_refused() -> None:
    with pytest.raises(SpecError, match="a part of an offloaded model"):
        iterate_weights(torch.nn.Linear(1, 1), plan_of(1, "offload.tier=optimizer:cpu"))
