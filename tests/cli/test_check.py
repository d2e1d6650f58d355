"""`fullshard check` and `fullshard version --all`."""

import json
from pathlib import Path

import pytest

from fullshard.checks.environment_report import environment_report
from fullshard.cli.main import main
from fullshard.report.checks import group_text
from fullshard.spec.finding import CheckReport, Finding
from tests.fakes.machines import gpu_machine, quiet_machine


def test_a_run_that_cannot_be_planned_is_a_failure_with_its_own_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["check", "--set", "run.ranks=5", "--set", "run.device=cpu"]
    assert main([*arguments, "--json"]) == 10
    report = CheckReport.model_validate_json(capsys.readouterr().out)
    assert [(one.check, one.status) for one in report.findings] == [("plan", "failure")]
    assert main(arguments) == 10
    assert "try: train.global_batch = 20 or 25" in capsys.readouterr().out


def test_a_group_is_one_line_with_the_reasons_of_what_was_skipped() -> None:
    found = [
        Finding.ok("a").model_copy(update={"check": "first_loss"}),
        Finding.skipped("no GPU").model_copy(update={"check": "topology"}),
        Finding.skipped("no GPU").model_copy(update={"check": "gpu_health"}),
    ]
    assert group_text(found) == "first loss; skipped: topology, gpu health (no GPU)"


def test_the_environment_report_leaves_secrets_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@mirror.example")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["version", "--all", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    report = json.loads(shown)
    assert (report["$HF_TOKEN"], report["$NCCL_DEBUG"]) == ("(set)", "INFO")
    assert {"torch", "python", "gpus", "cpu", "memory", "drive", "packages", "nccl"} <= set(report)


def test_the_environment_report_names_gpus_and_the_build_of_torch(tmp_path: Path) -> None:
    assert environment_report(quiet_machine(tmp_path))["gpus"] == "none that nvidia-smi reports"
    assert "cuda 12.4" in environment_report(gpu_machine(tmp_path))["torch"]
