"""Without an extra, what needs it says which one to install, before anything is made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.samples import save_tokenizer
from tests.fakes.architectures_hf import write_config

PROGRAM = """
import json, sys
from fullshard.errors import MissingExtraError
from fullshard.models.build import build_model
from fullshard.spec.run import Run
from fullshard.data.build import build_data
from fullshard.jobs.evaluations import import_functions
from fullshard.training.low_bit_adamw import import_adamw8bit_class

from fullshard.parallel.fp8 import import_float8

made_by = {"model": build_model, "data": build_data, "optimizer": lambda _: import_adamw8bit_class()}
made_by["precision"] = lambda _: import_float8()
made_by["task"] = import_functions
for what, absent, settings in json.loads(sys.argv[1]):
    sys.modules[absent] = None  # as if it were not there
    try:
        made_by[what](Run.load(overrides=settings))
    except MissingExtraError as error:
        print(str(error).replace("\\n", " "))
    else:
        print("nothing was missed")
"""

TASK = [
    "data.tokenizer=DIRECTORY",
    "data.source=text",
    'data.paths=["x"]',
    'evaluate=[{name="a", task="lm_eval:b"}]',
]
TOKENIZED = ["data.source=text", 'data.paths=["DIRECTORY/config.json"]', "data.tokenizer=DIRECTORY"]


# Several in one process, which takes its seconds to begin: none of them may import what another goes without.
@pytest.mark.parametrize(
    "cases",
    [
        [
            ("model", "transformers", ["model.hf=DIRECTORY"], "hf"),
            ("optimizer", "torchao", ["optimizer.name=adamw8bit"], "lowbit"),
            ("precision", "torchao", ["precision.mode=fp8"], "fp8"),
            ("task", "lm_eval", TASK, "lm_eval"),
            ("data", "pyarrow", ["data.source=parquet", 'data.paths=["DIRECTORY/config.json"]'], "data"),
        ],
        pytest.param([("model", "peft", ["adapter.rank=2"], "hf")], marks=pytest.mark.long),
        pytest.param([("data", "tokenizers", TOKENIZED, "hf")], marks=pytest.mark.long),
        pytest.param(
            [("data", "datasets", ["data.source=datasets", "data.name=x"], "data")], marks=pytest.mark.long
        ),
    ],
    ids=lambda cases: ", ".join(absent for _, absent, *_ in cases),
)
def test_a_missing_extra_is_named(cases: list[tuple[str, str, list[str], str]], tmp_path: Path) -> None:
    write_config("llama", tmp_path)
    save_tokenizer(tmp_path)  # one that the worker, which misses nothing, can open
    given = [
        (what, absent, [one.replace("DIRECTORY", str(tmp_path)) for one in settings])
        for what, absent, settings, _ in cases
    ]
    argv = [sys.executable, "-c", PROGRAM, json.dumps(given)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert len(said) == len(cases), done.stderr
    for line, (_, absent, _, extra) in zip(said, cases, strict=True):
        assert f"fullshard[{extra}]" in line
        assert absent in line
