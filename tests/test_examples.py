"""The programs in examples/ run, on one rank and on two, and say what they promise."""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.cli.main import main
from tests.data.samples import CHAT, WORDS, save_tokenizer, write_json_lines
from tests.fakes.sampling import sampled

EXAMPLES = Path(__file__).parent.parent / "examples"
README = EXAMPLES.parent / "README.md"
SAYS = {
    "fsdp_basics.py": "loss",
    "fsdp_transformer.py": "step 30: loss",
    "fsdp_checkpoint.py": "no_shard to step 20",
    "fsdp_memory_efficient.py": "and 4 microbatches",
    "dpo.py": "step 30: loss",
    "distill.py": "step 30: divergence",
    "hand_off.py": "step 30: 5 buckets, 0 missing",
}


def run_example(name: str) -> str:
    sys.argv = [name]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", sampled(SAYS, here=["fsdp_basics.py", "fsdp_checkpoint.py"]))
def test_the_example_runs(name: str, world_size: int, ranks: Any) -> None:
    outputs = ranks(world_size).run(run_example, name)
    assert SAYS[name] in outputs[0]
    assert not any(outputs[1:]), "rank 0 speaks for all"


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAYS, "answer.py", "first.py"}


def test_the_first_program_of_the_readme_shards_a_model_and_prints_what_the_readme_shows(ranks: Any) -> None:
    page = README.read_text(encoding="utf-8")
    program = (EXAMPLES / "first.py").read_text(encoding="utf-8")
    assert program.split('"""\n\n')[1] in page
    shown = re.findall(r"^rank \d of 2 holds .*\n", page, re.MULTILINE)
    assert ranks(2).run(run_example, "first.py") == shown


def answer(model: Path, chats: Path) -> list[str]:
    sys.argv = ["answer.py", str(model), str(chats)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / "answer.py"), run_name="__main__")
    return out.getvalue().splitlines()


def write_chats(path: Path, words: Iterable[str]) -> Path:
    chats = ([("user", f"say {word}"), ("assistant", f"{word}! {word}!")] for word in words)
    write_json_lines(path, ({"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats))
    return path


def save_model(directory: Path) -> None:
    """A tiny Llama with the tokenizer and chat template of the tests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tokenizer(directory, template=CHAT)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, eos_token_id=0)).save_pretrained(directory)


def test_a_model_answers_through_its_chat_template(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    lines = answer(tmp_path / "model", write_chats(tmp_path / "chats.jsonl", ["cat", "dog"]))
    assert lines[:2] == ["user       say cat", "expected   cat! cat!"]
    assert [line.split()[0] for line in lines if line.startswith("answer")] == ["answer"] * 2


@pytest.mark.parametrize("name", ["run", "absent"])
def test_a_directory_without_a_model_is_answered_with_the_export(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="not an exported model.*\n.*fullshard ckpt export"):
        answer(tmp_path / name, write_chats(tmp_path / "chats.jsonl", ["cat"]))


PAGE = (EXAMPLES.parent / "docs" / "converting.md").read_text(encoding="utf-8")
"""Blocks of the page follow each other: the axolotl file, what `convert` prints about it, an answer."""
AXOLOTL, SHOWN = (
    re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) for language in ("yaml", "text")
)


def convert_file_of_the_page(directory: Path, capfd: Any) -> tuple[str, str]:
    """Returns the run.toml and the table of the page's axolotl file, which is written to `directory`."""
    (directory / "lora.yml").write_text(*AXOLOTL)
    capfd.readouterr()
    assert main(["convert", str(directory / "lora.yml"), "--ranks", "2"]) == 0
    return tuple(capfd.readouterr())


def test_the_page_shows_what_convert_prints(tmp_path: Path, capfd: Any) -> None:
    assert convert_file_of_the_page(tmp_path, capfd)[1] == SHOWN[0]


@pytest.mark.long
def test_the_axolotl_file_of_the_page_and_a_chat_file_lead_to_a_model_that_answers(
    tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "Llama-3.2-1B-Instruct")
    words = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[:10] if a != b]
    write_chats(tmp_path / "chats.jsonl", words[5:])
    held_out = write_chats(tmp_path / "held_out.jsonl", words[:5])
    run = tmp_path / "run.toml"
    run.write_text(convert_file_of_the_page(tmp_path, capfd)[0])
    tiny = ("data.sequence_length=40", "train.epochs=40", "optimizer.learning_rate=0.005")
    tiny += ('adapter.trained=["embed_tokens", "lm_head"]', "train.global_batch=8")
    here = ("run.ranks=1", "run.device=cpu", "data.cache=cache", *tiny)
    settings = [str(run), *(part for one in here for part in ("--set", one))]
    assert main(["check", *settings]) == 0
    assert main(["plan", *settings]) == 0
    assert main(["train", *settings]) == 0
    assert main(["ckpt", "export", "outputs/out", "merged", "--format", "hf"]) == 0
    lines = answer(tmp_path / "merged", held_out)
    assert "\n".join(lines).startswith(SHOWN[1])
    answers = [line.split(maxsplit=1)[1] for line in lines if "answer" in line]
    assert answers == [f"{word}! {word}!" for word in words[:5]]
