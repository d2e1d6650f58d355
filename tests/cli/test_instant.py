"""Shipped and cached models are planned without torch, in a new process."""

import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.jobs.for_run import request_with_plan
from fullshard.launch.request import LaunchRequest
from fullshard.planner.describe.describe_run import SHIPPED_FILE, read_shipped_specs, version_without_build
from fullshard.spec.run import Run
from tests.planner.describe.test_describe_run import gpt2

PLAN = "import sys; from fullshard.cli.main import main; assert not main(sys.argv[1:])"
TRAIN = """
import sys
from fullshard.jobs.for_run import request_with_plan
from fullshard.launch.request import LaunchRequest
from fullshard.spec.run import Run
print(request_with_plan(LaunchRequest(run=Run.load(overrides=sys.argv[1:]))).plan.model_dump_json())
"""
MODULES = "\nprint([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"


def printed(code: str, *arguments: str) -> list[str]:
    """Returns the lines that `code` prints in a process of its own, which all have it import neither."""
    done = subprocess.run(
        [sys.executable, "-c", code + MODULES, *arguments], capture_output=True, text=True, check=True
    )
    *lines, modules = done.stdout.splitlines()
    assert modules == "[]", done.stderr
    return lines


@pytest.fixture(autouse=True)
def no_hardware_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_a_preset_is_planned_without_torch() -> None:
    from importlib.metadata import version

    if not read_shipped_specs(SHIPPED_FILE, torch=version_without_build(version("torch"))):
        pytest.skip("shipped for another torch")
    assert printed(PLAN, "plan", "llama3-8b", "--on", "8xH100")


def test_a_config_is_planned_without_torch_the_second_time(tmp_path: Path, capsys) -> None:
    from fullshard.cli.main import main

    gpt2(tmp_path)
    one_trace = ("--set", "recompute.mode=none", "--set", "run.compile=false")
    arguments = ("plan", str(tmp_path / "config.json"), "--on", "1xH100", "--json", *one_trace)
    assert main(arguments) == 0
    assert printed(PLAN, *arguments) == capsys.readouterr().out.splitlines()


def test_training_is_planned_without_torch_the_second_time() -> None:
    settings = ("model.layers=2", "run.device=cpu", "precision.mode=fp32", "recompute.mode=none")
    first = request_with_plan(LaunchRequest(run=Run.load(overrides=settings))).plan
    assert first is not None
    assert printed(TRAIN, *settings) == [first.model_dump_json()]
