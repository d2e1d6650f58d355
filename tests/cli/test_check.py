"""`fullshard check`."""

import pytest

from fullshard.cli.check import group_text
from fullshard.cli.main import main
from fullshard.spec.records.finding import CheckReport, Finding


def test_run_that_cannot_be_planned_fails_the_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["check", "--set", "run.ranks=5", "--set", "run.device=cpu"]
    assert main([*arguments, "--json"]) == 10
    report = CheckReport.model_validate_json(capsys.readouterr().out)
    assert [(one.check, one.status) for one in report.findings] == [("plan", "failure")]
    assert main(arguments) == 10
    assert "try: train.global_batch = 20 or 25" in capsys.readouterr().out


def test_group_is_one_line_with_reasons_of_skipped_checks() -> None:
    found = [
        Finding.ok("a").model_copy(update={"check": "first_loss"}),
        Finding.skipped("no GPU").model_copy(update={"check": "other_processes"}),
        Finding.skipped("no GPU").model_copy(update={"check": "gpu_health"}),
    ]
    assert group_text(found) == "first loss; skipped: other processes, gpu health (no GPU)"
