"""No command runs a file of the working directory that only has the name of a module."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.cli.main import _COMMANDS

# Modules of Python, of installed packages, ones that fullshard and torch look for and find only if they are
# installed, and one that Python runs at its start.
NAMES = [
    *("json", "types", "random", "pickle", "sitecustomize", "usercustomize", "fullshard", "torch", "numpy"),
    *(
        "pydantic",
        "typer",
        "transformers",
        "tokenizers",
        "peft",
        "safetensors",
        "triton",
        "tensorflow",
        "apex",
    ),
    *(
        "wandb",
        "tensorboard",
        "pyarrow",
        "torch_xla",
        "habana_frameworks",
        "request",
        "rank",
        "main",
        "train",
    ),
]
# Entry points by which installed packages add code to torch, pydantic and fullshard.
ENTRY_POINTS = "\n".join(
    f"[{one}]\nx = planted:run" for one in ("torch.backends", "pydantic", "fullshard.trackers")
)
TINY = [
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.d_ff=16", "data.sequence_length=16"),
    *("train.steps=2", "train.global_batch=2", "train.validate_sequences=2", "checkpoint.every=2"),
    *("run.device=cpu", "run.ranks=1", "log.trace_every=2", "run.dir=out", "data.cache=cache"),
]
SETTINGS = [word for one in TINY for word in ("--set", one)]
CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
COMMANDS = [
    *(
        ["init", "run.toml"],
        ["convert", "ds.json"],
        ["plan", "llama3-8b", "--on", "8xH100", "--save", "p.json"],
    ),
    *(["plan", *SETTINGS], ["data", "prepare", *SETTINGS], ["train", *SETTINGS], ["report", "out"]),
    *(
        ["report", "out", "--html", "out.html"],
        ["trace", "out"],
        ["ckpt", "list", "out"],
        ["ckpt", "verify", "out"],
    ),
    ["ckpt", "export", "out", "model.safetensors"],
    ["ckpt", "export", "out", "state.pt", "--format", "torch", "--optimizer"],
    ["ckpt", "import", "state.pt", "taken", "--run", "tiny.toml"],
    ["check", *SETTINGS],
    ["calibrate", "--device=cpu", "--ranks=1", "--seconds=0.1", "--out=measured.toml"],
]
# The program that pip installs, for several commands in a row.
PROGRAM = """
import json, sys
from fullshard.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) in (0, 2), words
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file for each of NAMES, which leaves a mark where it is run."""
    (directory := tmp_path / "downloaded").mkdir()
    mark = f"open({str(tmp_path / 'marks')!r}, 'a').write(__name__ + ' ')\nrun = None\n"
    for name in (*NAMES, "planted"):
        (directory / f"{name}.py").write_text(mark)
    (directory / "planted-1.dist-info").mkdir()
    (directory / "planted-1.dist-info" / "METADATA").write_text("Name: planted\nVersion: 1\n")
    (directory / "planted-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (directory / "ds.json").write_text(json.dumps(CONFIG))
    keys = [one.partition("=") for one in TINY]
    lines = [f"{key} = {value if value.isdigit() else json.dumps(value)}" for key, _, value in keys]
    (directory / "tiny.toml").write_text("\n".join(lines))
    yield directory
    assert not (tmp_path / "marks").exists(), (tmp_path / "marks").read_text()


def run_in(directory: Path, *argv: str) -> None:
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=directory,
        env={**os.environ, "FULLSHARD_CACHE": str(directory / "specs"), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_command_of_an_installed_fullshard_runs_a_file_of_the_working_directory(
    hostile: Path, tmp_path: Path
) -> None:
    (tmp_path / "fullshard").write_text(PROGRAM)
    run_in(hostile, str(tmp_path / "fullshard"), json.dumps(COMMANDS))
    assert (hostile / "model.safetensors").is_file()
    assert (hostile / "taken" / "checkpoints" / "step-00000002").is_dir()
    tried = [f"{' '.join(words)} " for words in COMMANDS]
    assert all(any(words.startswith(f"{name} ") for words in tried) for name in _COMMANDS)


def test_python_m_fullshard_runs_only_what_python_itself_imports_first(hostile: Path) -> None:
    for name in ("fullshard", "types"):  # Python finds these before fullshard begins
        (hostile / f"{name}.py").unlink()
    run_in(hostile, "-m", "fullshard", "plan", "llama3-8b", "--on", "8xH100")
