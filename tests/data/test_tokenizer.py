"""Text to tokens; tokenizers that are absent, broken or say too little are refused by name."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from fullshard.data.build import build_data, tokenizer_vocabulary_size
from fullshard.data.tokenizer import (
    ByteTokenizer,
    list_tokenizer_files,
    open_tokenizer,
    open_tokenizer_safely,
)
from fullshard.data.worker import call_in_worker
from fullshard.errors import DataError
from tests.data.samples import END, decoded, run_of, save_tokenizer, text, texts_file


def count_worker_calls(action: Callable[[], object]) -> int:
    """Calls `action`, and returns how often it called `call_in_worker`."""
    count = 0

    def count_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is call_in_worker.__code__

    sys.setprofile(count_call)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_process_tries_a_tokenizer_once(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok")
    sources = [{"source": "jsonl", "paths": (texts_file(tmp_path / f"{i}.jsonl", 40),)} for i in range(2)]
    run = run_of(tmp_path / "cache", sources=sources, tokenizer=path)

    def start() -> None:
        assert tokenizer_vocabulary_size(run.data) == build_data(run).vocabulary

    assert count_worker_calls(start) == 1
    assert count_worker_calls(start) == 0


def test_a_tokenizer_that_has_changed_is_tried_again(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok")
    (found,) = open_tokenizer_safely(path).tokens_after_document
    config = Path(path, "tokenizer_config.json")
    seen = config.stat()
    config.write_text(config.read_text().replace(END, "a" * len(END)))
    os.utime(config, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # with its size and its time
    with pytest.raises(DataError, match="ends a document"):
        open_tokenizer_safely(path)
    config.write_text(json.dumps({"eos_token": "a"}))
    assert count_worker_calls(lambda: open_tokenizer_safely(path)) == 1
    assert open_tokenizer_safely(path).tokens_after_document != (found,)
    assert count_worker_calls(lambda: open_tokenizer_safely(path, eos_token=END)) == 1


def test_tokens_are_those_of_the_library_with_an_end_behind(tmp_path: Path):
    from tokenizers import Tokenizer

    path = save_tokenizer(tmp_path / "tok")
    plain = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer = open_tokenizer(path)
    found = tokenizer.encode_texts([text(3), ""])
    assert [one.tolist() for one in found] == [plain.encode(text(3)).ids, []]
    assert (tokenizer.tokens_before_document, tokenizer.tokens_after_document) == (
        (),
        (plain.token_to_id(END),),
    )
    assert tokenizer.vocabulary_size == plain.get_vocab_size()
    assert decoded(path, found[0]) == text(3)


def test_special_tokens_of_the_tokenizer_surround_each_document(tmp_path: Path):
    from tokenizers import Tokenizer, processors

    path = Path(save_tokenizer(tmp_path / "tok"), "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<s>"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id(END)
    for single in ("<s> $A", f"<s> $A {END}"):
        specials = [("<s>", begin), (END, end)] if END in single else [("<s>", begin)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
        tokenizer.save(str(path))
        opened = open_tokenizer(str(path))
        assert (opened.tokens_before_document, opened.tokens_after_document) == ((begin,), (end,))
    assert open_tokenizer(str(path), eos_token="<s>").tokens_after_document == (end, begin)


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_texts(["é"])[0].tolist() == [0xC3, 0xA9]
    assert (tokenizer.vocabulary_size, tokenizer.tokens_after_document) == (256, (0,))
    with pytest.raises(DataError, match=r"(?s)NUL.*data\.tokenizer"):
        tokenizer.encode_texts(["a\0b"])
    with pytest.raises(DataError, match="UTF-8"):
        tokenizer.encode_texts(["\ud800"])


def test_tokens_follow_from_all_files_of_a_directory(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok")
    names = {"tokenizer.json", "tokenizer_config.json", "tool_use.jinja", "special_tokens_map.json"}
    (tmp_path / "tok" / "additional_chat_templates").mkdir()
    (tmp_path / "tok" / "additional_chat_templates" / "tool_use.jinja").touch()
    (tmp_path / "tok" / "special_tokens_map.json").write_text("{}")
    assert {file.name for file in list_tokenizer_files(path)} == names
    assert {file.name for file in list_tokenizer_files(f"{path}/tokenizer.json")} == names


def test_the_end_of_a_document_is_the_one_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    path = Path(save_tokenizer(tmp_path / "tok"))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "t"}}))
    for config in (
        {},
        {"eos_token": "a"},
        {"eos_token": "a", "added_tokens_decoder": {}},
        {"eos_token": None},
    ):
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
        theirs = transformers.AutoTokenizer.from_pretrained(str(path))
        assert open_tokenizer(str(path)).tokens_after_document == (theirs.eos_token_id,)
    file.write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json cannot be read"):
        open_tokenizer(str(path))


def test_a_name_in_the_cache_of_hugging_face_is_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    here = open_tokenizer(save_tokenizer(snapshot))
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(DataError, match="there is no tokenizer"):
        open_tokenizer("some/model")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert open_tokenizer("some/model").vocabulary_size == here.vocabulary_size


def test_absent_and_broken_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"(?s)no tokenizer.*no file"):
        open_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(DataError, match=r"(?s)older kind.*save_pretrained"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        open_tokenizer(str(tmp_path))


def test_a_token_that_ends_documents_must_be_known(tmp_path: Path):
    path = Path(save_tokenizer(tmp_path / "tok"))
    with pytest.raises(DataError, match=r"(?s)ends a document.*no <end>.*data\.eos_token"):
        open_tokenizer(str(path), eos_token="<end>")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert decoded(str(path), open_tokenizer(str(path)).tokens_after_document) == "a"
    (path / "tokenizer_config.json").unlink()
    assert decoded(str(path), open_tokenizer(str(path)).tokens_after_document) == END
