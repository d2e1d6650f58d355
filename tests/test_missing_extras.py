"""Without an extra, what needs it says which one to install, before anything is made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.architectures_hf import write_config

PROGRAM = """
import json, sys
sys.modules.update(dict.fromkeys(sys.argv[2].split(",")))  # as if they were not there
from fullshard.errors import MissingExtraError
from fullshard.models.build import build_model
from fullshard.spec.run import Run
from fullshard.training.data import build_data

run = Run.load(overrides=json.loads(sys.argv[3]))
try:
    {"model": build_model, "data": build_data}[sys.argv[1]](run)
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "absent", "settings", "extra"),
    [
        ("model", "transformers", ["model.hf=DIRECTORY"], "hf"),
        pytest.param("model", "peft", ["adapter.rank=2"], "hf", marks=pytest.mark.long),
        pytest.param(
            "data",
            "tokenizers",
            ["data.source=text", 'data.paths=["DIRECTORY/config.json"]', "data.tokenizer=DIRECTORY"],
            "hf",
            marks=pytest.mark.long,
        ),
        ("data", "pyarrow", ["data.source=parquet", 'data.paths=["DIRECTORY/config.json"]'], "data"),
        pytest.param(
            "data", "datasets", ["data.source=datasets", "data.name=x"], "data", marks=pytest.mark.long
        ),
    ],
)
def test_a_missing_extra_is_named(
    what: str, absent: str, settings: list[str], extra: str, tmp_path: Path
) -> None:
    write_config("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    given = json.dumps([one.replace("DIRECTORY", str(tmp_path)) for one in settings])
    argv = [sys.executable, "-c", PROGRAM, what, absent, given]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert f"fullshard[{extra}]" in done.stdout, done.stderr
    assert absent in done.stdout
