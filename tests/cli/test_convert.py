"""`fullshard convert`: a run.toml on standard output, a word on each key on standard error."""

import tomllib
from pathlib import Path

from fullshard.cli.main import main
from fullshard.errors import SpecError

CONFIG = Path(__file__).parents[1] / "convert" / "configs" / "deepspeed_zero3.json"


def test_the_run_goes_to_output_and_the_words_to_error(capsys):
    assert main(["convert", str(CONFIG)]) == 0
    shown = capsys.readouterr()
    assert tomllib.loads(shown.out)["sharding"]["strategy"] == "full_shard"
    assert "zero_optimization.stage" in shown.err
    assert "40 keys" in shown.err


def test_wrong_arguments_are_refused(capsys, tmp_path):
    assert main(["convert", str(tmp_path / "absent.json")]) == SpecError.exit_code
    assert main(["convert", str(CONFIG), "--from", "megatron"]) == SpecError.exit_code
    assert "torchtitan" in capsys.readouterr().err
