"""`fullshard bench` writes its result over nothing else."""

from pathlib import Path

import pytest

from fullshard.cli.main import main
from fullshard.errors import SpecError


def test_a_result_replaces_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "overhead.json").write_text('{"of": "somebody else"}')
    assert main(["bench", "overhead", "--set", f"run.dir={tmp_path}"]) == SpecError.exit_code
    assert "overhead.json exists already" in capsys.readouterr().err
