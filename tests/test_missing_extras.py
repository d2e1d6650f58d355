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
from fullshard.training.low_bit import eight_bit_adamw

run = Run.load(overrides=json.loads(sys.argv[3]))
try:
    made_by = {"model": build_model, "data": build_data, "optimizer": lambda _: eight_bit_adamw()}
    made_by[sys.argv[1]](run)
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
        ("optimizer", "torchao", ["optimizer.name=adamw8bit"], "lowbit"),
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
