"""A packed base: packed by rows while it is read, saved as bytes, and exported as matrices."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullshard.checkpoint.files import CheckpointFiles, LocalFiles
from fullshard.checkpoint.load import load, resolve_checkpoint
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from fullshard.models.build import build_model
from fullshard.models.packed_weights import (
    PackedWeight,
    pack_frozen_weights,
    pack_rows,
    unpack_weight,
)
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import check_can_continue
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.weights.export_hf import export_hf
from fullshard.weights.export_peft import export_peft
from fullshard.weights.hand_off import iterate_weights
from fullshard.weights.pretrained import load_pretrained
from tests.checkpoint.states import table_of
from tests.fakes.architectures import whole
from tests.fakes.data import Rows
from tests.fakes.plans import plan_of

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of much
Ranks = Callable[[int], Any]
SHAPES = {"0": (300, 128), "1": (7, 128), "2": (1, 64), "3": (2, 5, 64)}


class Stack(nn.Module):
    takes_any_experts = True

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.num_experts, self.weight = shape[0], nn.Parameter(torch.empty(shape))


class Uneven(nn.Module):
    """Frozen matrices of 300, 7 and 1 rows, two experts, and a trained vector."""

    def __init__(self) -> None:
        super().__init__()
        modules = (
            Stack(*one) if len(one) > 2 else nn.Linear(one[1], one[0], bias=False) for one in SHAPES.values()
        )
        self.blocks = nn.ModuleList(nn.ModuleDict({"linear": one}) for one in modules)
        self.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x


def packed_while_loading(path: Path, form: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = pack_frozen_weights(Uneven(), form)
    plan = plan_of(dist.get_world_size(), 'sharding.units.names=["blocks.*.linear"]')
    model = shard(model, plan, init="none")
    read = load_pretrained(model, path, plan=plan)
    assert set(read.dtypes) == {f"bfloat16 → {form}", "bfloat16 → float32"}
    return {name: whole(one) for name, one in model.named_parameters() if name != "gain"}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_rows_packed_by_each_rank_are_those_of_the_whole_packed_at_once(
    ranks: Ranks, tmp_path: Path, form: Any, count: int
) -> None:
    tensors = {f"blocks.{n}.linear.weight": torch.randn(shape).bfloat16() for n, shape in SHAPES.items()}
    save_file({**tensors, "gain": torch.ones(4).bfloat16()}, tmp_path / "model.safetensors")
    expected = {n: pack_rows(t, PackedWeight(n, form, tuple(t.shape))) for n, t in tensors.items()}
    for own in ranks(count).run(packed_while_loading, tmp_path, form):
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in expected)


def llama(directory: Path) -> Path:
    """A Llama with a matrix of uneven rows, and one with columns that 64 does not divide."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=99, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
        num_key_value_heads=2, dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


EXPERTS = 'adapter.targets=["q_proj", "gate_proj", "up_proj", "down_proj"]'


def mixture(directory: Path) -> Path:
    """A Qwen3-MoE whose experts are packed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
        num_key_value_heads=2, num_experts=3, num_experts_per_tok=2, head_dim=16, dtype="bfloat16",
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


def plan_with(directory: Path, *settings: str) -> Plan:
    """One step of 12 sequences, of a packed Llama."""
    data = ["train.global_batch=12", "train.steps=3", "data.sequence_length=8", f"model.hf={directory}/in"]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return plan_of(
        ranks, *data, "adapter.rank=4", "adapter.base_dtype=nf4", "schedule.warmup_steps=0", *settings
    )


def loaded_state(directory: Path, *settings: str, saved: Any = "all") -> tuple[TrainState, Plan]:
    plan = plan_with(directory, *settings)
    model = shard(build_model(plan.run), plan, init="none")
    load_pretrained(model, directory / "in", plan=plan)
    return TrainState(model, build_optimizer(model, plan), data=Rows(32), saved=saved), plan


def tensors_after(directory: Path, place: str, *settings: str) -> dict[str, Tensor]:
    """Continues from `place` if there is a checkpoint, else takes a step first. Saves in `place`."""
    state, plan = loaded_state(directory, *settings)
    if not load(state, directory / place, missing_ok=True):
        next(train(state, plan))
    save(state, directory / place, plan=plan)
    return {name: whole(one).detach() for name, one in state.tensors().items() if not name.startswith("rng")}


@pytest.mark.parametrize(
    ("write", "settings", "name"),
    [
        (llama, [], "up_proj.base_layer.weight"),
        (mixture, [EXPERTS], "experts.base_layer.base_layer.gate_up_proj"),
    ],
)
def test_a_checkpoint_of_three_ranks_is_the_same_bits_on_two_and_one(
    ranks: Ranks, tmp_path: Path, write: Callable[[Path], Path], settings: list[str], name: str
) -> None:
    write(tmp_path / "in")
    outside = ("offload.tier=params+optimizer:cpu",)
    first, *others = (
        ranks(count).run(tensors_after, tmp_path, "saved", *settings, *more)[0]
        for count, more in ((3, ()), (2, ()), (2, outside), (1, ()))
    )
    assert first[f"model.model.layers.0.mlp.{name}"].dtype == torch.uint8
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first if "model" in name)


def handed_over(directory: Path, *settings: str) -> dict[str, dict[str, Tensor]]:
    state, plan = loaded_state(directory, *settings)
    next(train(state, plan))
    save(state, directory / "saved", plan=plan)
    given = {"state": {name: whole(one) for name, one in state.tensors().items()}}
    for names in ("huggingface", "own"):
        buckets = iterate_weights(state.model, plan, names=names)
        given[names] = {name: one for bucket in buckets for name, one in bucket.items()}
    return given


def test_an_export_is_the_dequantised_base_with_its_adapters(ranks: Ranks, tmp_path: Path) -> None:
    llama(tmp_path / "in")
    given = ranks(2).run(handed_over, tmp_path, "adapter.alpha=8")[0]
    export_hf(tmp_path / "saved", tmp_path / "hf")
    exported, merged = load_file(tmp_path / "hf" / "model.safetensors"), given["huggingface"]
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in merged)
    name = "model.layers.1.mlp.gate_proj"
    state = {key.removeprefix("model."): one for key, one in given["state"].items()}
    base = unpack_weight(
        state[f"{name}.base_layer.weight"], PackedWeight(name, "nf4", (99, 64)), dtype=torch.bfloat16
    )
    assert torch.equal(base, given["own"][f"{name}.base_layer.weight"])
    added = 2 * state[f"{name}.lora_B.default.weight"] @ state[f"{name}.lora_A.default.weight"]
    assert torch.equal(exported[f"{name}.weight"], (base.float() + added).bfloat16())
    export_peft(tmp_path / "saved", tmp_path / "peft")
    assert all("lora" in key for key in load_file(tmp_path / "peft" / "adapter_model.safetensors"))


class _CountedFile(io.FileIO):
    """Adds the bytes of blocks that are read to `blocks_bytes`."""

    blocks_bytes: Counter[str] = Counter()

    def readinto(self, buffer: Any, /) -> int:
        got = super().readinto(buffer) or 0
        self.blocks_bytes[str(self.name)] += got
        return got


class _CountedFiles(LocalFiles):
    def open_file(self, name: str) -> Any:
        return _CountedFile(self.path / name)


class _CountedLocation(LocalLocation):
    def list_checkpoints(self) -> list[tuple[int, CheckpointFiles]]:
        return [(step, _CountedFiles(Path(str(one)))) for step, one in super().list_checkpoints()]


def test_an_export_of_experts_is_their_dequantised_base_with_its_adapters(
    ranks: Ranks, tmp_path: Path
) -> None:
    mixture(tmp_path / "in")
    given = ranks(2).run(handed_over, tmp_path, "adapter.alpha=8", EXPERTS)[0]
    export_hf(_CountedLocation(tmp_path / "saved"), tmp_path / "hf")
    for rank in range(2):
        file = tmp_path / f"saved/step-00000001/__{rank}_0.distcp"
        pieces = table_of(file.parent, file.name).pieces
        of_model = sum(piece.length for piece in pieces if piece.name.startswith("model."))
        assert 0 < _CountedFile.blocks_bytes[str(file)] <= of_model  # no block twice
    exported, merged = load_file(tmp_path / "hf" / "model.safetensors"), given["huggingface"]
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in merged)
    name = "model.model.layers.1.mlp.experts.base_layer"
    a, b = (given["state"][f"{name}.lora_{one}.default.weight"] for one in "AB")
    packed = given["state"][f"{name}.base_layer.gate_up_proj"]
    base = unpack_weight(packed, PackedWeight(name, "nf4", (3, 256, 64)), dtype=torch.float32)
    increments = torch.einsum("ore,eri->eoi", b.view(256, -1, 3), a.view(3, -1, 64))
    expected = (base.bfloat16().float() + 2 * increments).bfloat16()
    for expert in range(3):
        for part, rows in (("gate", slice(0, 128)), ("up", slice(128, 256))):
            own = exported[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
            torch.testing.assert_close(own, expected[expert, rows], rtol=1e-2, atol=0)


def saved_adapters(directory: Path, *settings: str) -> None:
    state, plan = loaded_state(directory, "adapter.save=adapters", *settings, saved="trained")
    save(state, directory / "alone", plan=plan)


@pytest.mark.parametrize("other", ["int8", "bf16", "auto"])
def test_a_base_in_another_format_is_refused_by_name(ranks: Ranks, tmp_path: Path, other: str) -> None:
    llama(tmp_path / "in")
    ranks(1).run(saved_adapters, tmp_path)
    files, manifest = resolve_checkpoint(tmp_path / "alone")
    assert not any("base_layer" in name for name in manifest.tensors)
    run = plan_with(tmp_path, f"adapter.base_dtype={other}").run
    with pytest.raises(CheckpointError, match="adapter.base_dtype: nf4 in the checkpoint"):
        check_can_continue(run, build_model(run), manifest=manifest)
    manifest.values["packed_weights"]["names"].pop()
    same = plan_with(tmp_path).run
    with pytest.raises(CheckpointError, match="nf4 of other matrices"):
        check_can_continue(same, build_model(same), manifest=manifest)
