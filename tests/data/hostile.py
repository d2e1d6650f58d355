"""Small inputs that stand for much: each is small on disk, and has no end, or fills the memory."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.samples import save_tokenizer, write_json_lines

MIB = 1 << 20

TEMPLATES = {
    "product": "{{ 'x' * 10000000000 }}",
    "long text": "{{ 'x' * 300000000 }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "indent": "{{ messages | tojson(indent=2000000000) }}",
    "power": "{{ 10**(10**9) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
}


def hostile_template(name: str, directory: Path) -> dict[str, Any]:
    """Writes a tokenizer with a template, and a conversation; returns the settings that read them."""
    path = write_json_lines(
        directory / "a.jsonl", [{"messages": [{"role": "user", "content": "the cat"}]}] * 3
    )
    tokenizer = save_tokenizer(directory / "tokenizer", template=TEMPLATES[name])
    return {"source": "jsonl", "paths": (path,), "records": "messages", "tokenizer": tokenizer}


def _replace_doubling(tree: dict[str, Any]) -> None:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
    tree["normalizer"] = {"type": "Sequence", "normalizers": [one] * 8}


def _prepend(tree: dict[str, Any]) -> None:
    tree["normalizer"] = {"type": "Prepend", "prepend": "the " * 12_000_000}


def _many_specials(tree: dict[str, Any]) -> None:
    pieces = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}] * 1_000_000
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*pieces, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }


TOKENIZERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "replace": _replace_doubling,
    "prepend": _prepend,
    "special tokens": _many_specials,
}


def hostile_tokenizer(name: str, directory: Path) -> dict[str, Any]:
    tokenizer = save_tokenizer(directory / "tokenizer")
    file = directory / "tokenizer" / "tokenizer.json"
    tree = json.loads(file.read_bytes())
    TOKENIZERS[name](tree)
    file.write_text(json.dumps(tree))
    path = write_json_lines(directory / "a.jsonl", [{"text": "the"}, {"text": "a" * 40}, {"text": "on"}])
    return {"source": "jsonl", "paths": (path,), "tokenizer": tokenizer}


def _zst(data: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zst,
}


def write_packed(path: Path, *, mebibytes: int, unit: bytes = b"x", head: bytes = b"") -> str:
    """Writes a file of many MiB, of which each is packed alone, as by appending."""
    pack = PACKED[path.suffix[1:]]
    with path.open("wb") as file:
        file.write(pack(head) if head else b"")
        block = pack(unit * (MIB // len(unit)))
        for _ in range(mebibytes):
            file.write(block)
    return str(path)


def write_sparse(path: Path, size: int, *, head: bytes = b"") -> str:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return str(path)


def write_parquet_of_one_text(path: Path, *, rows: int, characters: int) -> str:
    import pyarrow
    import pyarrow.parquet

    one = pyarrow.array(["x" * characters])
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), one)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", store_schema=False)
    return str(path)


def write_npy(path: Path, header: str, *, size: int = 64) -> str:
    """Writes an .npy file with any header, whose data are `size` zeros."""
    text = header.ljust(117) + "\n"
    return write_sparse(
        path,
        10 + len(text) + size,
        head=b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode(),
    )
