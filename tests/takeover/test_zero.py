"""Takes over the checkpoints of DeepSpeed in `fixtures/`, which `make_deepspeed_fixtures.py` made."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fullshard.cli.main import main
from fullshard.errors import CheckpointError
from fullshard.takeover import zero
from fullshard.takeover.formats import open_foreign_checkpoint
from fullshard.takeover.source import ForeignCheckpoint
from fullshard.takeover.stand_ins import StandIn, read_torch_file
from tests.takeover.test_refused import Calls
from tests.takeover.unpacked import FIXTURES

FORMATS = {
    "zero1_bf16": "DeepSpeed ZeRO-1",
    "zero1_tied_frozen": "DeepSpeed ZeRO-1",
    "zero1_fp16": "DeepSpeed ZeRO-1",
    "zero2_fp32": "DeepSpeed ZeRO-2",
    "zero2_round_robin": "DeepSpeed ZeRO-2",
    "zero2_aligned": "DeepSpeed ZeRO-2",
    "zero2_offload": "DeepSpeed ZeRO-2",
    "zero3_bf16": "DeepSpeed ZeRO-3",
    "zero3_subgroups": "DeepSpeed ZeRO-3",
    "zero3_offload": "DeepSpeed ZeRO-3",
    "bf16_optimizer": "DeepSpeed BF16_Optimizer",
    "universal1": "DeepSpeed universal",
    "universal3": "DeepSpeed universal",
}
TIED = {"zero1_tied_frozen", "zero3_bf16", "universal1"}
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def read_truth(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of the engine that saved the fixture, and its values."""
    path = FIXTURES / name / "truth.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["values"])


def read_all(found: ForeignCheckpoint) -> dict[str, Tensor]:
    """Returns every tensor under its name, and moments under KEY.NAME."""
    moments = {
        f"{key}.{name}": one for name, some in found.optimizer.moments.items() for key, one in some.items()
    }
    return {name: one.read() for name, one in (dict(found.weights) | moments).items()}


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that copies a fixture, and returns the directory of its step."""

    def copy(name: str) -> Path:
        return next(Path(shutil.copytree(FIXTURES / name, tmp_path / name)).glob("global_step3*"))

    return copy


def rewrite(path: Path, change: Callable[[Any], object] = lambda content: None) -> None:
    """Writes a file anew after `change`, without the classes of DeepSpeed."""
    content = without_classes(read_torch_file(path, classes=zero._CLASSES))
    change(content)
    torch.save(content, path)


def without_classes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_classes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_classes(one) for one in value]
    if isinstance(value, StandIn):
        return value.args[0] if value.args else value.state
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_moments_are_those_of_the_engine_bit_for_bit(name: str):
    truth, _ = read_truth(name)
    found = zero.open_source(FIXTURES / name)
    tensors = read_all(found)
    if name in TIED:
        torch.testing.assert_close(tensors.pop("head.weight"), tensors["embed.weight"], rtol=0, atol=0)
    assert tensors.keys() == truth.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(
            tensor, truth[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert zero.recognises(FIXTURES / name)
    assert (found.format, found.version) == (FORMATS[name], "0.19.8")


@pytest.mark.parametrize("name", FORMATS)
def test_progress_and_groups_are_those_of_the_engine(name: str):
    truth, values = read_truth(name)
    found = zero.open_source(FIXTURES / name)
    assert (found.step, found.skipped_steps) == (values["steps"], values["skipped"])
    assert found.settings == {"train.global_batch": values["samples"] // values["steps"]}
    assert f"{values['samples']} samples" in found.notes[0]
    groups = found.optimizer.groups
    assert [group.settings["lr"] for group in groups] == [(rate,) for rate in values["rates"][-1]]
    assert [group.settings["weight_decay"] for group in groups] == [(0.1,), (0.0,)]
    names = [name for group in groups for name in group.names]
    assert sorted(names) == sorted(found.optimizer.moments)
    assert {truth[name].ndim for name in groups[1].names} == {1}


def test_the_loss_scale_of_fp16_is_reported_and_its_masters_are_fp32():
    _, values = read_truth("zero1_fp16")
    found = zero.open_source(FIXTURES / "zero1_fp16")
    assert values["skipped"] > 0
    assert f"loss scale was {values['scale']:g}" in found.notes[1]
    assert {found.weights[name].dtype for name in found.optimizer.moments} == {torch.float32}


@pytest.mark.parametrize("name", ["zero2_fp32", "zero3_subgroups"])
def test_files_of_plain_values_give_the_same_tensors(name: str, copied: Callable[[str], Path]):
    directory = copied(name)
    for path in directory.iterdir():
        rewrite(path)
    for key, tensor in read_all(zero.open_source(directory)).items():
        torch.testing.assert_close(tensor, read_truth(name)[0][key], rtol=0, atol=0)


def without_moments(content: Any) -> None:
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del state["exp_avg"], state["exp_avg_sq"]


def test_weights_are_found_without_moments(copied: Callable[[str], Path]):
    """As with SGD: the vectors of weights lack the padding that moments have."""
    directory = copied("zero2_fp32")
    for rank in range(3):
        rewrite(directory / OPTIMIZER.format(rank), without_moments)
    found, (truth, _) = read_all(zero.open_source(directory)), read_truth("zero2_fp32")
    assert all(torch.equal(tensor, truth[name]) for name, tensor in found.items())
    assert found.keys() == {name for name in truth if not name.startswith("exp_avg")}


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def swap(first: str, second: str) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        (directory / first).rename(directory / "third")
        (directory / second).rename(directory / first)
        (directory / "third").rename(directory / second)

    return change


def swap_and_save_anew(directory: Path) -> None:
    swap(OPTIMIZER.format(0), OPTIMIZER.format(1))(directory)
    for rank in range(3):
        rewrite(directory / OPTIMIZER.format(rank))


def truncate(name: str) -> Callable[[Path], object]:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size // 2)


def add_file(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).touch()


def change_values(name: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda directory: rewrite(directory / name, change)


def set_step(content: Any) -> None:
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 1


def set_every_step(directory: Path) -> None:
    for rank in range(3):
        rewrite(directory / OPTIMIZER.format(rank), set_step)


def call(function: Any, *arguments: Any) -> Callable[[Path], object]:
    """Puts a call into a file; FILE in its arguments is a file that shows that it ran."""

    def change(directory: Path) -> None:
        shown = [one.replace("FILE", str(directory / "ran")) for one in arguments]
        content = {"optimizer_state_dict": Calls(function, *shown)}
        torch.save(content, directory / OPTIMIZER.format(1))

    return change


def shorten(content: Any) -> None:
    groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-1].clone()


def lengthen(content: Any) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[0] = torch.cat([groups[0], groups[0][:1]])


def with_optimizer(kind: str, **values: Any) -> Callable[[Path], object]:
    settings = {"optimizer": {"type": kind, "params": values}}
    return change_values("mp_rank_00_model_states.pt", lambda content: content.update(ds_config=settings))


MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MUTATIONS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no optimizer file": (
        "zero2_fp32",
        remove(OPTIMIZER.format(1)),
        "one optimizer file per rank.*0 of rank 1",
    ),
    "no last optimizer file": ("zero2_fp32", remove(OPTIMIZER.format(2)), "file per rank.*0 of rank 2"),
    "a file of a far rank": ("zero2_fp32", add_file(OPTIMIZER.format(4000000000)), "0 of rank 3; 4 files"),
    "no optimizer file of ZeRO-3": ("zero3_bf16", remove("bf16_" + OPTIMIZER.format(2)), "0 of rank 2"),
    "no model file": ("zero3_bf16", remove(MODEL.format(2)), "one model file per rank.*0 of rank 2"),
    "two files of a rank": ("zero2_fp32", add_file("bf16_" + OPTIMIZER.format(1)), "2 of rank 1"),
    "a rank of another step": ("zero2_fp32", change_values(OPTIMIZER.format(1), set_step), "several steps"),
    "all ranks of another step": ("zero2_fp32", set_every_step, "several steps"),
    "a model of another step": (
        "zero3_bf16",
        change_values(MODEL.format(1), lambda content: content.update(global_steps=2)),
        "several steps",
    ),
    "truncated": ("zero2_fp32", truncate(OPTIMIZER.format(1)), "cannot be read"),
    "truncated model": ("zero2_fp32", truncate("mp_rank_00_model_states.pt"), "cannot be read"),
    "swapped ranks": ("zero3_subgroups", swap(OPTIMIZER.format(0), OPTIMIZER.format(1)), "not its own file"),
    "swapped models": ("zero3_subgroups", swap(MODEL.format(0), MODEL.format(1)), "not its own file"),
    "swapped ranks, saved anew": ("zero2_fp32", swap_and_save_anew, "differs between|do not hold all"),
    "a part too short": ("zero2_fp32", change_values(OPTIMIZER.format(0), shorten), "do not hold all of"),
    "a part too long": ("zero3_subgroups", change_values(OPTIMIZER.format(0), lengthen), "vectors of"),
    "os.system": ("zero2_fp32", call(os.system, "touch FILE"), "asks for posix.system"),
    "getattr": ("zero2_fp32", call(getattr, "", "join"), "can run code"),
    "tensor parallel": ("zero2_fp32", add_file("zero_pp_rank_0_mp_rank_01_optim_states.pt"), "parallel"),
    "pipeline": ("zero2_fp32", add_file("layer_00-model_states.pt"), "parallel"),
    "experts": ("zero2_fp32", add_file("expp_rank_0_mp_rank_00_optim_states.pt"), "parallel"),
    "other values": (
        "zero2_fp32",
        change_values("mp_rank_00_model_states.pt", lambda content: content.update(param_shapes=[3])),
        "not as its trainer writes",
    ),
    "without ZeRO": (
        "zero2_fp32",
        change_values("mp_rank_00_model_states.pt", lambda content: content.update(optimizer={"state": {}})),
        "without ZeRO",
    ),
    **{
        f"settings of {kind}": ("zero2_fp32", with_optimizer(kind, **values), f"otherwise.*{match}")
        for kind, values, match in (
            ("Lamb", {}, "optimizer.type = Lamb"),
            ("OneBitAdam", {}, "optimizer.type = OneBitAdam"),
            ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "in the gradient"),
            ("AdamW", {"bias_correction": False}, "bias_correction"),
        )
    },
    "a path in latest": (
        "zero2_fp32",
        lambda one: (one.parent / "latest").write_text("../x"),
        "no directory",
    ),
    "no name in latest": ("zero2_fp32", lambda one: (one.parent / "latest").write_text(".."), "no directory"),
    "no universal file": ("universal3", remove("zero/norm.weight/fp32.pt"), "not hold all of norm.weight"),
    "swapped universal files": (
        "universal1",
        swap("zero/norm.weight/fp32.pt", "zero/norm.bias/fp32.pt"),
        "differs between",
    ),
}


@pytest.mark.parametrize(("name", "mutate", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_damaged_or_hostile_checkpoint_is_one_error(
    name: str, mutate: Callable[[Path], object], message: str, copied: Callable[[str], Path]
):
    directory = copied(name)
    mutate(directory)
    with pytest.raises(CheckpointError) as caught:
        read_all(open_foreign_checkpoint(directory.parent))
    assert re.search(message, str(caught.value), re.DOTALL), caught.value
    assert not (directory / "ran").exists()


def test_adamw_of_deepspeed_ignores_adam_w_mode(copied: Callable[[str], Path]):
    directory = copied("zero2_fp32")
    with_optimizer("AdamW", adam_w_mode=False, weight_decay=0.1)(directory)
    assert zero.open_source(directory).step == 3


def test_a_directory_of_deepspeed_is_recognised_and_no_other_is(tmp_path: Path):
    assert isinstance(open_foreign_checkpoint(FIXTURES / "zero3_bf16" / "global_step3"), ForeignCheckpoint)
    assert not any(zero.recognises(FIXTURES / name) for name in ("fsdp2_dcp/source", "trainer/source"))
    assert not zero.recognises(tmp_path)


def test_settings_of_deepspeed_are_offered_as_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["ckpt", "import", str(FIXTURES / "zero2_offload"), str(tmp_path)]) == 0
    offered = tomllib.loads(capsys.readouterr().out)
    assert offered["optimizer"]["clip_norm"] == 1.0
    assert offered["optimizer"]["learning_rate"] == 1e-2  # the peak, not the rate of the step
    assert offered["schedule"]["warmup_steps"] == 10
    assert offered["train"]["global_batch"] == 4
    assert offered["precision"]["mode"] == "bf16"


def test_a_checkpoint_of_the_trainer_offers_its_model(copied: Callable[[str], Path]):
    directory = copied("zero2_fp32")
    (directory.parent / "config.json").touch()
    assert zero.open_source(directory).settings["model.hf"] == str(directory.parent)


def test_reading_holds_one_parameter_in_memory(tmp_path: Path):
    """Files are mapped, and the parts of a parameter are joined when it is read."""
    numel, count, ranks = 250_000, 40, 2
    shapes = {f"layer.{index}": torch.Size([numel]) for index in range(count)}
    for rank in range(ranks):
        part = torch.rand(numel * count // ranks)
        state = {"step": 3, "exp_avg": part, "exp_avg_sq": part}
        optimizer = {"state": {0: state}, "param_groups": [{"params": [0]}]}
        content = {"zero_stage": 1, "partition_count": [ranks], "base_optimizer_state": optimizer}
        content["single_partition_of_fp32_groups"] = [part.clone()]
        torch.save({"optimizer_state_dict": content}, tmp_path / OPTIMIZER.format(rank))
    model = {"module": {}, "param_shapes": [shapes], "global_steps": 3, "skipped_steps": 0}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    del part, state, optimizer, content
    zero.open_source(FIXTURES / "zero1_bf16")  # imports what a first reader imports
    begin_bytes, peak_bytes = anonymous_bytes(), 0
    found = zero.open_source(tmp_path)
    for name in shapes:
        for tensor in (found.weights[name], *found.optimizer.moments[name].values()):
            read = tensor.read()
            peak_bytes = max(peak_bytes, anonymous_bytes() - begin_bytes)
            del read
    assert peak_bytes < 4 * 4 * numel


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
