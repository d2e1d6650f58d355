"""Weights of Hugging Face in shards: the same numbers as from_pretrained, each rank reading its own bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.models.huggingface import build_hf_model
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.resume import find_pretrained_directory
from fullshard.training.shard import shard
from fullshard.weights.files import open_pretrained_files
from fullshard.weights.pretrained import LoadReport, fill_selected_tensors, load_pretrained
from tests.checkpoint.states import assert_same
from tests.fakes.architectures_hf import CONFIGS
from tests.fakes.plans import plan_of
from tests.fakes.sampling import sampled
from tests.training.same_numbers import build, make_run
from tests.weights.hugging_face import hugging_face, outcome, whole


def imported(directory: Path, name: str, *settings: str) -> tuple[LoadReport, dict[str, Tensor], Tensor]:
    plan = plan_of(dist.get_world_size(), *settings)
    model = shard(build_hf_model(HuggingFaceModel(hf=str(directory))), plan, init="none").eval()
    loaded = load_pretrained(model, directory, plan=plan)
    return loaded, {n: whole(t) for n, t in model.state_dict().items()}, outcome(model, name)


@pytest.mark.parametrize("name", sampled(CONFIGS, here=["llama", "mixtral"]))
def test_three_ranks_hold_the_tensors_of_from_pretrained(ranks, tmp_path, name):
    model = hugging_face(name, tmp_path, max_shard_size="20KB")
    loaded, tensors, logits = ranks(3).run(imported, tmp_path, name)[0]
    assert_same(tensors, {n: t.detach() for n, t in model.state_dict().items()})
    assert torch.allclose(logits, outcome(model, name), atol=1e-5)
    assert (loaded.missing, loaded.surplus) == ((), ())


def decoder_from_files(directory: Path) -> dict[str, Tensor]:
    run = make_run(model="decoder", ranks=6, strategy="full_shard", length=16, tensor=2)
    plan = Plan.from_run(run, world_size=6)
    model = shard(build("decoder", run), plan, init="none")
    load_pretrained(model, directory, plan=plan)
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def test_a_vocabulary_that_two_axes_divide_unevenly_is_loaded_as_it_is(ranks, tmp_path):
    """13 rows are 7 and 6 over two ranks, and these 3, 3, 1 and 2, 2, 2 over three."""
    run = make_run(model="decoder", ranks=1, strategy="no_shard")
    expected = {
        name: t.detach() for name, t in materialize(build("decoder", run), seed=7).state_dict().items()
    }
    written(tmp_path, expected)
    for tensors in ranks(6).run(decoder_from_files, tmp_path):
        assert_same(tensors, expected)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"up": nn.Linear(5, 7), "down": nn.Linear(7, 5)})
        self.head = nn.Linear(5, 3)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(2))


def written(directory: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def some(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers() -> dict[str, Tensor]:
    shapes = {
        "up.weight": (7, 5),
        "up.bias": (7,),
        "model.down.weight": (5, 7),
        "model.down.bias": (5,),
        "tied.weight": (3, 5),
        "head.bias": (3,),
        "seen": (2,),
    }
    return {name: some(shape, seed).bfloat16() for seed, (name, shape) in enumerate(shapes.items())}


def test_prefixes_ties_buffers_and_dtypes_are_matched(tmp_path):
    model = Small()
    loaded = load_pretrained(model, written(tmp_path, {**numbers(), "extra": torch.ones(2)}))
    expected = {f"model.{n}" if n[:2] == "up" else n: t.float() for n, t in numbers().items()}
    assert_same(model.state_dict(), {**expected, "head.weight": expected["tied.weight"]})
    assert (loaded.tied, loaded.surplus, loaded.missing) == (
        (("head.weight", "tied.weight"),),
        ("extra",),
        (),
    )
    assert loaded.dtypes == {"bfloat16 → float32": 7}
    assert model.tied.weight is model.head.weight


def test_tied_tensors_with_different_values_in_the_files_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = hugging_face("llama", tmp_path / "in")  # with a head of its own
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    tying = transformers.AutoConfig.for_model(**config | {"tie_word_embeddings": True})
    tied = type(model)(tying)
    with pytest.raises(CheckpointError, match=r"(?s)different values for .*tie_word_embeddings = false"):
        load_pretrained(tied, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    load_pretrained(tied, tmp_path / "in")
    assert torch.equal(tied.lm_head.weight, tensors["lm_head.weight"])


def loaded_partly(directory: Path) -> tuple[LoadReport, dict[str, Tensor]]:
    plan = plan_of(dist.get_world_size(), "sharding.units.min_parameters=20")
    with torch.device("meta"):
        model = Small()
    model.seen = torch.zeros(2)
    shard(model, plan, init="none")
    loaded = load_pretrained(model, directory, plan=plan)
    return loaded, {n: whole(t) for n, t in model.state_dict().items()}


def test_missing_tensors_are_initialised_alike_at_any_rank_count(ranks, tmp_path):
    given = {name: t for name, t in numbers().items() if not name.startswith("model.down")}
    with torch.device("meta"):
        alone = Small()
    alone.seen = torch.zeros(2)
    expected = materialize(alone, seed=0).state_dict()
    for loaded, tensors in ranks(3).run(loaded_partly, written(tmp_path, given)):
        assert loaded.missing == ("model.down.weight", "model.down.bias")
        for name in loaded.missing:
            assert torch.equal(tensors[name], expected[name])
        assert torch.equal(tensors["model.up.weight"], given["up.weight"].float())


def placed(directory: Path) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (3,))
    model = Small()
    for module, placement in ((model.model["up"], Shard(1)), (model.model["down"], Shard(0))):
        whole_weight = torch.zeros_like(module.weight)
        module.weight = nn.Parameter(distribute_tensor(whole_weight, mesh, [placement]))
    model.head.bias = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    fill_selected_tensors(model, directory)
    return {n: whole(t) for n, t in model.state_dict().items()}


def test_shards_of_columns_and_of_uneven_rows_are_read(ranks, tmp_path):
    for tensors in ranks(3).run(placed, written(tmp_path, numbers())):
        assert torch.equal(tensors["model.up.weight"], numbers()["up.weight"].float())
        assert torch.equal(tensors["model.down.weight"], numbers()["model.down.weight"].float())


def test_another_shape_is_an_error_that_gives_both(tmp_path):
    path = written(tmp_path, {**numbers(), "head.bias": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"head.bias is \[4\] there and \[3\] here"):
        load_pretrained(Small(), path)


def test_a_model_without_memory_is_refused(tmp_path):
    with torch.device("meta"):
        model = Small()
    with pytest.raises(CheckpointError, match="no memory"):
        load_pretrained(model, written(tmp_path, numbers()))


def test_quantised_weights_are_refused(tmp_path):
    path = written(tmp_path, {**numbers(), "head.bias": torch.ones(3, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="quantised"):
        load_pretrained(Small(), path)


def rewritten(path: Path, change: Any) -> None:
    """The file with another header, and the same bytes behind it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def overlapping(header: dict[str, Any]) -> None:
    header["up.weight"]["data_offsets"] = header["model.down.weight"]["data_offsets"]


DAMAGES: dict[str, Any] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "cut off in the header": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "no JSON": lambda path: path.write_bytes(path.read_bytes()[:8] + b"x" * 4000),
    "overlapping tensors": lambda path: rewritten(path, overlapping),
    "another shape": lambda path: rewritten(path, lambda header: header["up.bias"].update(shape=[8])),
    "an unknown dtype": lambda path: rewritten(path, lambda header: header["up.bias"].update(dtype="F7")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_before_a_tensor_is_read(tmp_path, damage):
    path = written(tmp_path, numbers()) / "model.safetensors"
    DAMAGES[damage](path)
    with pytest.raises(DamagedCheckpointError, match="not a complete safetensors file"):
        open_pretrained_files(tmp_path)


def test_files_without_their_index_and_an_index_without_its_files_are_refused(tmp_path):
    hugging_face("llama", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not there"):
        open_pretrained_files(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="without their index"):
        open_pretrained_files(tmp_path)
    with pytest.raises(CheckpointError, match="no weights"):
        open_pretrained_files(index.parent / "..")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "pytorch_model.bin", "part.safetensors"])
def test_weights_that_cannot_be_read_are_refused_and_adapters_beside_weights_named(tmp_path, name, caplog):
    hugging_face("llama", tmp_path)
    (tmp_path / name).touch()
    run = plan_of(1, f"model.hf={tmp_path}").run
    assert find_pretrained_directory(run) == tmp_path
    load_pretrained(build_hf_model(run.model).to_empty(device="cpu"), tmp_path)
    assert (f"{name} of {tmp_path} are not read" in caplog.text) == name.startswith("adapter_")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=name):
        find_pretrained_directory(run)
    assert find_pretrained_directory(run.with_overrides(["model.weights=none"])) is None


def import_of_large_tensors(directory: Path) -> tuple[int, int, int]:
    """Bytes of this process at the peak of an import over those before; bytes of its shards, and read."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 4096, bias=False) for _ in range(2)))
    settings = ("sharding.units.min_parameters=9",)
    shard(model, plan_of(dist.get_world_size(), *settings), init="none")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    loaded = fill_selected_tensors(model, directory)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return resident_bytes("VmHWM") - before, held, loaded.read_bytes


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc of Linux")
def test_an_import_holds_its_shards_and_no_whole_tensor(ranks, tmp_path):
    weights = {f"{i}.weight": torch.ones((4096, 8192), dtype=torch.bfloat16) for i in range(2)}
    for over, held, read in ranks(2).run(import_of_large_tensors, written(tmp_path, weights)):
        assert over < 48 << 20  # buffers of 32 MiB, and what a process takes to run; a tensor has 64
        assert read == held / 2 == 64 << 20  # bf16 there, fp32 here; half of each tensor
