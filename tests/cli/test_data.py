"""`fullshard data prepare` makes what the run needs, and says what there is."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from fullshard.cli.main import main
from tests.data.samples import save_tokenizer, texts_file


def prepare(tmp_path: Path, *settings: str) -> int:
    own = [f'data.cache="{tmp_path}/cache"', *settings]
    return main(["data", "prepare", *(word for one in own for word in ("--set", one)), "--json"])


def test_data_is_prepared_once(tmp_path: Path, capsys):
    texts_file(tmp_path / "a.jsonl", 200)
    tokenizer = save_tokenizer(tmp_path / "tok")
    settings = ("data.source=jsonl", f'data.paths=["{tmp_path}/*.jsonl"]', f'data.tokenizer="{tokenizer}"')
    settings += ("data.packing=best_fit", "data.sequence_length=64", "model.vocabulary=512")
    assert prepare(tmp_path, *settings) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["packing"]) == (200, "best_fit")
    assert summary["validation sequences"] > 0
    files = [path for path in (tmp_path / "cache").rglob("[!.]*") if path.is_file()]
    written = {path: path.stat().st_mtime_ns for path in files}
    assert prepare(tmp_path, *settings) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert written == {path: path.stat().st_mtime_ns for path in written}


def prepare_on_rank(tmp_path: Path, path: str) -> str:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        assert (
            prepare(tmp_path, "data.source=jsonl", f'data.paths=["{path}"]', "data.sequence_length=64") == 0
        )
    return printed.getvalue()


def test_one_of_the_ranks_that_prepare_data_prints_the_summary(ranks, tmp_path: Path):
    first, other = ranks(2).run(prepare_on_rank, tmp_path, texts_file(tmp_path / "a.jsonl", 200))
    assert json.loads(first)["documents"] == 200
    assert other == ""


def test_data_prepare_prints_a_summary_for_people(tmp_path: Path, capsys):
    sources = ", ".join(
        f'{{source = "jsonl", paths = ["{texts_file(tmp_path / f"{i}.jsonl", 50)}"], weight = {weight}}}'
        for i, weight in enumerate((0.7, 0.3))
    )
    run = tmp_path / "run.toml"
    settings = {"cache": f'"{tmp_path}/cache"', "sources": f"[{sources}]", "sequence_length": 16}
    run.write_text("[data]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    assert main(["data", "prepare", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "documents   100" in shown
    assert "70 % + 30 %, exactly" in shown
    assert "steps       30, which pass " in shown


def test_wrong_data_has_its_exit_code(tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text("{")
    settings = ("data.source=jsonl", f'data.paths=["{tmp_path}/a.jsonl"]')
    assert prepare(tmp_path, *settings) == 5
    assert "a.jsonl line 1" in capsys.readouterr().err
    assert prepare(tmp_path, "data.source=python", "data.factory=a:b") == 2


def test_a_tokenizer_larger_than_the_model_is_refused_before_tokens_are_made(tmp_path: Path, capsys):
    texts_file(tmp_path / "a.jsonl", 20)
    tokenizer = save_tokenizer(tmp_path / "tok")
    settings = ("data.source=jsonl", f'data.paths=["{tmp_path}/*.jsonl"]', f'data.tokenizer="{tokenizer}"')
    assert prepare(tmp_path, *settings, "model.vocabulary=256") == 2
    assert "a vocabulary of 256" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_tokens_above_the_vocabulary_are_refused(tmp_path: Path, capsys):
    np.save(tmp_path / "a.npy", np.arange(500, dtype=np.uint16))
    settings = ("data.source=memmap", f'data.paths=["{tmp_path}/a.npy"]', "data.sequence_length=8")
    assert prepare(tmp_path, *settings, "model.vocabulary=499") == 2
    assert "tokens up to 499, and a vocabulary of 499" in capsys.readouterr().err
    assert prepare(tmp_path, *settings, "model.vocabulary=500") == 0


def test_the_vocabulary_of_a_config_json_counts(tmp_path: Path, capsys):
    np.save(tmp_path / "a.npy", np.arange(500, dtype=np.uint16))
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 499}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ("data.source=memmap", f'data.paths=["{tmp_path}/a.npy"]', "data.sequence_length=8")
    assert prepare(tmp_path, *settings, f"model.hf={tmp_path}") == 2
    assert "a vocabulary of 499" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("the cat sat on a mat " * 99)
    settings = ("data.source=text", f'data.paths=["{tmp_path}/a.txt"]', f"model.hf={tmp_path}")
    assert prepare(tmp_path, *settings) == 2
    assert "the tokens are bytes, and the model has another vocabulary" in capsys.readouterr().err
    assert prepare(tmp_path, *settings, "model.options.text_config.vocab_size=256") == 0
    assert prepare(tmp_path, f"model.hf={tmp_path}") == 2
    assert "the run has no data" in capsys.readouterr().err
