"""`fullshard ckpt import`: what it prints, writes and returns."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint.manifest import read_manifest
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from fullshard.system.files import xxh3_digest_of_file
from fullshard.takeover.formats import open_foreign_checkpoint
from tests.takeover.test_zero import rewrite
from tests.takeover.tiny import RUN, initial
from tests.takeover.unpacked import FIXTURES


def test_command_reports_every_tensor_and_writes_into_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, source = tmp_path / "run.toml", str(FIXTURES / "fsdp2_dcp/source")
    run.write_text(RUN)
    arguments = ["ckpt", "import", source, str(tmp_path / "out"), "--run", str(run)]
    assert main([*arguments, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert f"--set run.dir={tmp_path / 'out'}" in printed.err
    assert main(arguments) == SpecError.exit_code
    written = Path(printed.out.strip())
    assert written == tmp_path / "out/checkpoints/step-00000003"
    origin = read_manifest(written).values["origin"]
    assert isinstance(origin, dict)
    files = sorted(Path(source).iterdir())
    assert (origin["format"], origin["files"]) == ("DCP", {str(p): xxh3_digest_of_file(p) for p in files})
    for name in (*read_manifest(written).model_tensors, "model.not taken over", "model.lr of"):
        assert name.removeprefix("model.") in printed.err


def test_command_ends_with_2_if_a_rate_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("0.01", "0.01001"))
    source = str(FIXTURES / "torch_names/source.pt")
    assert main(["ckpt", "import", source, str(tmp_path), "--run", str(run), "--dry-run"]) == 2
    assert "0.004 in the source, 0.004004 in the run" in capsys.readouterr().err


def test_the_printed_optimizer_continues_the_source_without_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = dict(initial().named_parameters())
    first, *others = named
    groups = [
        {"params": [(first, named[first])], "lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.75)},
        {"params": [(name, named[name]) for name in others], "weight_decay": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5, eps=1e-5)
    sum(one.sum() for one in named.values()).backward()
    optimizer.step()
    content = {"model": initial().state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(content, tmp_path / "one.pt")
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("warmup_steps = 10", "warmup_steps = 0"))
    arguments = [
        "ckpt",
        "import",
        str(tmp_path / "one.pt"),
        str(tmp_path / "out"),
        "--run",
        str(run),
        "--dry-run",
    ]
    assert main(arguments) == SpecError.exit_code
    printed = capsys.readouterr().err
    optimizer_text = printed[printed.index("[optimizer]\n") :]
    before, _, rest = run.read_text().partition("[optimizer]")
    run.write_text(before + rest[rest.index("[schedule]") :] + optimizer_text + "clip_norm = 0.0\n")
    assert main(arguments) == 0


def test_command_without_a_run_prints_the_settings_that_the_source_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(FIXTURES / "torch_names/source.pt")
    assert main(["ckpt", "import", source, str(tmp_path)]) == 0
    printed = capsys.readouterr()
    offered = tomllib.loads(printed.out)
    assert offered["optimizer"]["learning_rate"] == 0.01
    assert offered["run"]["dir"] == str(tmp_path)
    assert "nothing is imported" in printed.err
    assert not any(tmp_path.iterdir())


def test_the_directory_around_a_checkpoint_is_refused_with_its_name(tmp_path: Path) -> None:
    around = Path(FIXTURES / "fsdp2_dcp/source").parent
    with pytest.raises(CheckpointError, match=f"try: {around}/source"):
        open_foreign_checkpoint(around)


def offered_by(source: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["ckpt", "import", str(source), str(source.parent / "out")]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_the_offered_optimizer_is_the_source_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = [*initial().parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.5)
    momentum = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True)
    cycle = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.OneCycleLR(cycle, max_lr=0.5, total_steps=9)
    for optimizer, name in ((sgd, "sgd"), (momentum, "sgd"), (cycle, "adamw")):
        content = {"model": initial().state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        torch.save(content, tmp_path / "one.pt")
        own = offered_by(tmp_path / "one.pt", capsys)["optimizer"]
        assert (own["name"], own["learning_rate"]) == (name, 0.5)
        nested = {"momentum": 0.9, "nesterov": 1.0} if optimizer is momentum else None
        assert own.get("options") == nested


def test_schedule_of_torch_beside_settings_of_deepspeed_is_not_offered_as_constant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer with DeepSpeed has a scheduler of its own."""
    path = Path(shutil.copytree(FIXTURES / "zero2_fp32", tmp_path / "source"))
    file = path / "global_step3/mp_rank_00_model_states.pt"

    def set_rates(content: Any) -> None:
        content["ds_config"].pop("scheduler")

    def set_initial(content: Any) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group["initial_lr"] = 0.5

    one_cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.5}}
    rewrite(file, lambda content: content["ds_config"].update(scheduler=one_cycle))
    assert main(["ckpt", "import", str(path), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "schedule" not in tomllib.loads(printed.out)
    assert "not in this run.toml: scheduler.type" in printed.err
    rewrite(file, set_rates)
    assert offered_by(path, capsys)["schedule"]["kind"] == "constant"
    for one in (path / "global_step3").glob("*optim_states.pt"):
        rewrite(one, set_initial)
    (path / "trainer_state.json").write_text('{"max_steps": 7}')
    found = offered_by(path, capsys)
    assert ("schedule" in found, found["train"]["steps"]) == (False, 7)


def test_weights_narrower_than_the_run_trains_them_have_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    for dtype, count in ((torch.bfloat16, 1), (torch.float32, 0)):
        torch.save({"model": initial().to(dtype).state_dict(), "step": 0}, tmp_path / "one.pt")
        arguments = [str(tmp_path / "one.pt"), str(tmp_path / "out"), "--run", str(tmp_path / "run.toml")]
        assert main(["ckpt", "import", *arguments, "--dry-run"]) == 0
        report = " ".join(capsys.readouterr().err.split())
        assert (
            report.count("10 of 10 parameters are in torch.bfloat16, and trained in torch.float32") == count
        )
