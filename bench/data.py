"""Making tokens against the tokenizers library alone, in turns: the page bench/results/…-data.md.

python bench/data.py [--megabytes 100] [--turns 5] [--vocabulary 32000] [--directory .probe/data]

Pieces of the standard library's source, 200 to 3,000 characters each, as JSON lines; a byte-level BPE
trained on them. Each turn, in this order and the next turn in the other: the library alone (texts in memory
before the clock starts, `encode_batch_fast` in lists of 1,000, its own threads on all cores; nothing is
written), and `fullshard`'s store of tokens from an empty cache (the file's digest, reading, JSON, processes
started, tokens written and flushed). Both make the same tokens, which is checked. Beside the time on the
clock, that of the processors, which says more where something else runs. Then the packing of what was made.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from shutil import rmtree

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fullshard.data.build import build_packed_data
from fullshard.data.files import list_stdlib_files
from fullshard.spec.run import Run

AT_ONCE = 1000
END = "<|endoftext|>"
ASKED = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--directory", type=Path, default=Path(".probe/data"))
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    source = asked.directory / "texts.jsonl"
    texts = write_texts(source, size=asked.megabytes * 1_000_000)
    tokenizer = trained(texts, asked.directory / "tokenizer.json", vocabulary=asked.vocabulary)
    print(
        f"{source.stat().st_size / 1e6:.1f} MB, {len(texts):,} documents, {asked.vocabulary:,} tokens known"
    )
    ratios, of_processors = list[float](), list[float]()
    for turn in range(asked.turns):
        seconds, busy = dict[str, float](), dict[str, float]()
        for who in ("library", "fullshard")[:: 1 if turn % 2 == 0 else -1]:
            before = sum(os.times()[:4])
            if who == "library":
                seconds[who], alone = library(tokenizer, texts)
            else:
                seconds[who], made = ours(source, asked.directory)
            busy[who] = sum(os.times()[:4]) - before
        assert made == alone + len(texts), f"{made:,} tokens, and {alone:,} with one more a document expected"
        ratios.append(seconds["fullshard"] / seconds["library"])
        of_processors.append(busy["fullshard"] / busy["library"])
        rates = ", ".join(
            f"{who} {made / taken / 1e6:.3f}M tokens/s" for who, taken in sorted(seconds.items())
        )
        print(
            f"turn {turn + 1}: {rates}, time x {ratios[-1]:.3f}, of processors x {of_processors[-1]:.3f}",
            flush=True,
        )
    for name, found in (("time", ratios), ("processors' time", of_processors)):
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{name}: median {statistics.median(found):.3f} ({spread}); asked: {ASKED} at most")
    for packing in ("best_fit", "concat"):
        started = time.perf_counter()
        data = build_packed_data(run_of(source, asked.directory, packing=packing))
        took = time.perf_counter() - started
        print(f"{packing} in {took:.2f} s: {data.describe()}")


def write_texts(path: Path, *, size: int) -> list[str]:
    """Pieces of source files until they are `size` bytes; a file may come again, cut otherwise."""
    files = [Path(one.path).read_text(encoding="utf-8", errors="ignore") for one in list_stdlib_files()]
    drawn, texts = random.Random(0), list[str]()
    left = size
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            whole = drawn.choice(files)
            begin, length = drawn.randrange(len(whole)), int(200 + 2800 * drawn.betavariate(1, 3))
            if piece := whole[begin : begin + length]:
                texts.append(piece)
                left -= file.write(json.dumps({"text": piece}) + "\n")
    return texts


def trained(texts: list[str], path: Path, *, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:8000], trainer)
    tokenizer.save(str(path))
    return tokenizer


def library(tokenizer: Tokenizer, texts: list[str]) -> tuple[float, int]:
    """(seconds, tokens). Their numbers are taken as lists, as anybody must who wants them."""
    # A tokenizer remembers what it has cut before. The processes start with one that has seen nothing.
    fresh = Tokenizer.from_str(tokenizer.to_str())
    started, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), AT_ONCE):
        found = fresh.encode_batch_fast(texts[first : first + AT_ONCE], add_special_tokens=False)
        tokens += sum(len(one.ids) for one in found)
    return time.perf_counter() - started, tokens


def ours(source: Path, directory: Path) -> tuple[float, int]:
    """(seconds, tokens, with one more a document)."""
    rmtree(directory / "cache", ignore_errors=True)
    run = run_of(source, directory, packing="concat")
    started = time.perf_counter()
    data = build_packed_data(run)
    return time.perf_counter() - started, sum(len(store.tokens) for store in data.pools[0].stream.stores)


def run_of(source: Path, directory: Path, *, packing: str) -> Run:
    section = {
        "source": "jsonl",
        "paths": (str(source),),
        "tokenizer": str(directory / "tokenizer.json"),
        "cache": str(directory / "cache"),
        "packing": packing,
        "sequence_length": 2048,
    }
    return Run.parse({"data": section}, source="the bench")


if __name__ == "__main__":
    main()
