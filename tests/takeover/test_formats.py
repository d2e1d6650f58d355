"""Weights, first and second moments of each format are taken over without a difference."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import Snapshot
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.errors import CheckpointError
from fullshard.spec.run import Run
from fullshard.takeover.formats import open_foreign_checkpoint
from fullshard.takeover.names import match_names
from fullshard.takeover.source import ForeignCheckpoint, LazyTensor
from fullshard.takeover.write import ImportTarget, make_snapshot, write_checkpoint
from tests.takeover.tiny import RUN, STEPS, initial
from tests.takeover.unpacked import FIXTURES

# Parts of names in Llama of transformers, and in the reference decoder.
OF_DECODER = {
    "model.embed_tokens": "embedding",
    "model.layers.": "blocks.",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    **{".self_attn.q_proj": ".attention.query", ".self_attn.k_proj": ".attention.key"},
    **{".self_attn.v_proj": ".attention.value", ".self_attn.o_proj": ".attention.output"},
    "mlp.": "feed_forward.",
    "_proj": "",
}
LLAMA = """
[model]
vocabulary = 11
d_model = 12
layers = 1
heads = 2
kv_heads = 1
d_ff = 5
"""


def run_of(directory: Path, text: str = RUN) -> Run:
    path = directory / "run.toml"
    path.write_text(text)
    return Run.load(path)


def taken_over(
    path: Path, run: Run, *, order: Any = None
) -> tuple[ForeignCheckpoint, Snapshot, ImportTarget]:
    source = open_foreign_checkpoint(path)
    target = ImportTarget.of_run(run)
    return (
        source,
        make_snapshot(source, match_names(source, target.model, order=order), target=target),
        target,
    )


def read_back(snapshot: Snapshot, target: ImportTarget, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the committed checkpoint."""
    written = write_checkpoint(snapshot, str(directory), plan=target.plan)
    ((_, files),) = location_of(directory).list_checkpoints()
    manifest = read_manifest(written)
    tensors = {n: torch.empty(one.shape, dtype=one.torch_dtype) for n, one in manifest.tensors.items()}
    CheckpointReader(files, manifest).read_tensors(tensors)
    return tensors


def assert_equals_truth(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    kinds = ("exp_avg", "exp_avg_sq")
    names = {f"model.{n}": n for n in truth if not n.startswith("exp_avg")}
    names |= {
        f"optimizer.{n.removeprefix(f'{kind}.')}.{kind}": n
        for kind in kinds
        for n in truth
        if n.startswith(f"{kind}.")
    }
    steps = {name for name in found if name.endswith(".step")}
    assert found.keys() - steps == names.keys()
    assert all(found[name].item() == STEPS for name in steps)
    assert [name for name, own in names.items() if not torch.equal(found[name], truth[own])] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *(("fsdp2_dcp", "source"), ("torch_names", "source.pt"), ("torch_numbers", "source.pt")),
        *(("torch_numbers", "legacy.pt"), ("fsdp1_flat", "source"), ("fsdp1_flat", "dcp")),
        *((f"fsdp1_local{kind}", by) for kind in ("", "_parts") for by in ("source", "accelerate")),
        *(("accelerate_sharded", "source"), ("accelerate_full", "source")),
        *(("lightning_sharded", "source"), ("lightning_full", "source.ckpt")),
    ],
)
def test_an_import_holds_exactly_the_source(name: str, source: str, tmp_path: Path) -> None:
    path, order = FIXTURES / name / source, None
    if name == "torch_numbers":
        order = (FIXTURES / name / "order.txt").read_text().split()
    if name == "lightning_full":
        order = "parameters"
    found, snapshot, target = taken_over(path, run_of(tmp_path), order=order)
    assert (found.step, found.tokens) == (STEPS, None)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert_equals_truth(read_back(snapshot, target, tmp_path / "out"), truth)
    assert snapshot.values["origin"]["format"] == found.format
    assert "tokens" not in snapshot.values
    assert snapshot.values["rows"] == STEPS * 12


def test_trainer_checkpoint_gives_its_model_and_the_order_of_its_moments(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = FIXTURES / "trainer/source"
    run = run_of(tmp_path, f'[model]\nhf = "{path}"\n[train]\nsteps = 8\n')
    found, snapshot, target = taken_over(path, run)
    assert found.settings == {"model.hf": str(path), "train.steps": STEPS}
    truth = load_file(FIXTURES / "trainer/truth.safetensors")
    assert_equals_truth(read_back(snapshot, target, tmp_path / "out"), truth)


def test_steps_that_the_scaler_of_trainer_skipped_are_no_updates(tmp_path: Path) -> None:
    path = shutil.copytree(FIXTURES / "trainer/source", tmp_path / "source")
    (path / "scaler.pt").touch()
    state = json.loads((path / "trainer_state.json").read_text()) | {"global_step": 5}
    (path / "trainer_state.json").write_text(json.dumps(state))
    found = open_foreign_checkpoint(path)
    assert (found.step, found.skipped_steps, found.update_steps) == (5, 5 - STEPS, STEPS)


@pytest.mark.parametrize(("name", "kv_heads"), [("torchtitan_0_2", 1), ("torchtitan_0_3", 2)])
def test_torchtitan_llama_and_its_moments_get_the_rows_of_hugging_face(
    name: str, kv_heads: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path, LLAMA.replace("kv_heads = 1", f"kv_heads = {kv_heads}"))
    found, snapshot, target = taken_over(FIXTURES / name / "source", run)
    assert (found.step, found.tokens) == (STEPS, 180)
    truth: dict[str, torch.Tensor] = {}
    for own, tensor in load_file(FIXTURES / name / "truth.safetensors").items():
        for old, new in OF_DECODER.items():
            own = own.replace(old, new)
        truth[own] = tensor
    assert_equals_truth(read_back(snapshot, target, tmp_path / "out"), truth)


def test_parts_of_a_fused_tensor_of_torchtitan_have_its_number_of_updates(tmp_path: Path) -> None:
    found = open_foreign_checkpoint(FIXTURES / "torchtitan_0_3/source")
    (fused,) = [name for name in found.optimizer.updates if "wqkv" in name]
    model = ImportTarget.of_run(run_of(tmp_path, LLAMA.replace("kv_heads = 1", "kv_heads = 2"))).model
    one = replace(found.optimizer, updates={**found.optimizer.updates, fused: 2})
    updates = match_names(replace(found, optimizer=one), model).updates
    parts = {f"blocks.0.attention.{one}.weight" for one in ("query", "key", "value")}
    assert {name for name, count in updates.items() if count == 2} == parts
    lacking = {name: one for name, one in found.weights.items() if not name.endswith("wk.weight")}
    with pytest.raises(CheckpointError, match=re.escape(fused)):
        match_names(replace(found, weights=lacking), model)


def test_settings_of_the_source_stand_beside_those_of_the_run(tmp_path: Path) -> None:
    source = open_foreign_checkpoint(FIXTURES / "fsdp2_dcp/source")
    for text, differ in ((RUN, set()), (RUN.replace("0.01", "0.02"), {"lr"})):
        target = ImportTarget.of_run(run_of(tmp_path, text))
        matched = match_names(source, target.model)
        settings = list(target.compare_settings(matched, step=source.step))
        assert {one.key for one in settings if one.differs} == differ
        assert {one.key for one in settings} == {"lr", "weight_decay", "betas", "eps"}


def test_only_llama_of_torchtitan_is_rearranged(tmp_path: Path) -> None:
    """Qwen3 has the names of Llama, and two norms more."""
    source = open_foreign_checkpoint(FIXTURES / "torchtitan_0_2/source")
    name = "layers.0.attention.q_norm.weight"
    more = replace(source, weights={**source.weights, name: LazyTensor.from_tensor(torch.ones(6))})
    target = ImportTarget.of_run(run_of(tmp_path, LLAMA))
    with pytest.raises(CheckpointError, match=name):
        match_names(more, target.model)
    target = ImportTarget.of_run(run_of(tmp_path))
    with pytest.raises(CheckpointError, match="Tiny in the run"):
        match_names(source, target.model)


@pytest.mark.parametrize(
    ("name", "options"), [("sgd", "momentum = 0.9"), ("muon", ""), ("adamw", "amsgrad = true")]
)
def test_state_is_taken_over_for_the_optimizers_that_have_it(name: str, options: str, tmp_path: Path) -> None:
    text = RUN.replace("betas = [0.9, 0.999]", f'name = "{name}"') + f"[optimizer.options]\n{options}\n"
    target = ImportTarget.of_run(run_of(tmp_path, text))
    model, state = initial(), dict[str, dict[str, torch.Tensor]]()
    for own, one in model.named_parameters():
        state[own] = {key: torch.rand_like(one) for key in target.state_keys(own)}
    group = {"params": ["blocks.0.up.weight"], "momentum": 0.8, "nesterov": name == "muon"}
    group |= {"ns_steps": 6, "ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None}
    entries = {"optimizer": {"state": state, "param_groups": [group]}, "step": STEPS}
    torch.save({"model": model.state_dict()} | entries, tmp_path / "one.pt")
    source = open_foreign_checkpoint(tmp_path / "one.pt")
    matched = match_names(source, target.model)
    settings = target.compare_settings(matched, step=STEPS)
    others = {"sgd": {"momentum"}, "muon": {"momentum", "ns_steps", "adjust_lr_fn"}}
    assert {one.key for one in settings if one.differs} == others.get(name, set())
    snapshot = make_snapshot(source, matched, target=target)
    found = read_back(snapshot, target, tmp_path / "out")
    kinds = {own: {*one} for own, one in state.items()}
    assert ("momentum_buffer" in kinds["blocks.0.up.weight"]) is (name != "adamw")
    assert (kinds["embed.weight"] == {"momentum_buffer"}) is (name == "sgd")
    for own, one in state.items():
        assert all(torch.equal(found[f"optimizer.{own}.{key}"], value) for key, value in one.items())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbers_beside_a_file_count_the_parameters_of_the_model(suffix: str, tmp_path: Path) -> None:
    """A file of safetensors sorts its names, which begin with `blocks`."""
    model = initial()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    if suffix == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    _, snapshot, _ = taken_over(tmp_path, run_of(tmp_path), order="parameters")
    for name, one in model.named_parameters():
        read = snapshot.tensors[f"optimizer.{name}.exp_avg_sq"].cpu()
        assert torch.equal(read, optimizer.state[one]["exp_avg_sq"]), name


def test_weights_of_lightning_are_the_trained_ones_and_not_their_average(tmp_path: Path) -> None:
    model = initial().state_dict()
    average = {name: one + 1 for name, one in model.items()}
    content = {"state_dict": average, "current_model_state": model, "step": 0}
    torch.save(content, tmp_path / "one.ckpt")
    found = open_foreign_checkpoint(tmp_path / "one.ckpt")
    assert all(torch.equal(one.read(), model[name]) for name, one in found.weights.items())
    assert found.notes == ()


def test_a_directory_of_lightning_fabric_has_the_count_of_its_optimizer(tmp_path: Path) -> None:
    path = Path(shutil.copytree(FIXTURES / "fsdp2_dcp/source", tmp_path / "source"))
    torch.save({"iter_num": 2 * STEPS}, path / "meta.pt")
    found = open_foreign_checkpoint(path)
    assert (found.format, found.step) == ("DCP", STEPS)
