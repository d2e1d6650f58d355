"""Plans of converted files, with a model whose config is on this machine."""

from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.convert.conversion import convert_config
from fullshard.errors import SpecError
from tests.convert.test_convert import CONFIGS
from tests.fakes.architectures_hf import write_config

OF_A_MODEL = [path for path in CONFIGS if "some/model" in path.read_text()]
# Names of datasets in LLaMA-Factory's own dataset_info.json: which files they are is for the user to say.
UNKNOWN_DATA = ("data.source=jsonl", 'data.paths=["chats.jsonl"]')


QUICK = ("axolotl_chat.yaml", "llama_factory_sft.yaml", "trl_sft.yaml")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=() if path.name in QUICK else pytest.mark.long)
        for path in OF_A_MODEL
    ],
)
def test_the_written_run_can_be_planned(path: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run.toml"
    run.write_text(convert_config(path.read_text(), name=path.name, ranks=8).run_toml_text())
    write_config("llama", tmp_path)
    quick = (f"model.hf={tmp_path}", "recompute.mode=none", "run.compile=false", "data.sequence_length=32")
    arguments = [str(run), "--on", "8xH100", *(part for one in quick for part in ("--set", one))]
    if "llama_factory" in path.name:
        assert main(["plan", *arguments]) == SpecError.exit_code
        assert "the run has no data" in capsys.readouterr().err
        arguments += [part for one in UNKNOWN_DATA for part in ("--set", one)]
    assert main(["plan", *arguments]) == 0, capsys.readouterr().err
