"""Small data on disk, and a tokenizer trained on the spot."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "far", "away", "from")
END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def save_tokenizer(directory: Path, *, template: str | None = None) -> str:
    """A byte-level BPE of 300 tokens with its config; returns the directory's name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"chat_template": template} if template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def decoded(path: str, tokens: Iterable[int]) -> str:
    """The text of tokens, by the library."""
    from tokenizers import Tokenizer

    file = path if path.endswith(".json") else f"{path}/tokenizer.json"
    return Tokenizer.from_file(file).decode([*map(int, tokens)], skip_special_tokens=False)


def save_metaspace_tokenizer(directory: Path) -> str:
    """A tokenizer like Llama 2's: a blank before the first word of a text. Returns the directory's name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["\n\n".join(WORDS), " ".join(WORDS)] * 4, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def text(i: int) -> str:
    """The i-th of many short texts, each of another length and beginning."""
    return f"{i}: " + " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(1 + i * 5 % 23))


def write_json_lines(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_rows(kind: str, directory: Path, rows: list[dict[str, Any]]) -> dict[str, object]:
    """Writes `rows` as jsonl, parquet or datasets; returns the settings that read them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = str(directory / f"rows.{kind}")
    if kind == "jsonl":
        write_json_lines(Path(path), rows)
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=9)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
    return {"source": kind, "paths": (path,)}


def texts_file(path: Path, count: int, *, first: int = 0) -> str:
    return write_json_lines(path, ({"text": text(first + i)} for i in range(count)))


def run_of(cache: Path, *, seed: int = 0, **data: object) -> Run:
    section = {"cache": str(cache), "sequence_length": 16, "processes": 1, **data}
    return Run.parse({"data": section, "run": {"seed": seed}}, source="test")


def plan_of(world: int, microbatch: int, accumulation: int = 1, **train: int) -> Plan:
    batch = world * microbatch * accumulation
    train = {"global_batch": batch, "microbatch": microbatch, **train}
    return Plan.from_run(Run.parse({"train": train}, source="test"), world_size=world)
