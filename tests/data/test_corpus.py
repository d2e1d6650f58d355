"""Sources become the tokens of the library itself, the same by any number of processes; made once."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.data.files import SourceFile
from fullshard.data.readers import FilePart, split_file
from fullshard.data.sources import open_token_stores
from fullshard.data.token_store import TokenStore, make_cache_directory, no_heartbeat
from fullshard.data.tokenize import TokenizeSettings, tokenize_tasks
from fullshard.data.tokenizer import open_tokenizer
from fullshard.errors import DataError, FullshardError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.samples import (
    CHAT,
    decoded,
    run_of,
    save_metaspace_tokenizer,
    save_tokenizer,
    text,
    texts_file,
    write_json_lines,
    write_rows,
)


def store_of(tmp_path: Path, **data: object) -> TokenStore:
    section = run_of(tmp_path / "cache", **data).data
    root = make_cache_directory(section.cache)
    (store,) = open_token_stores(section, section, root=root, alive=no_heartbeat)
    return store


def documents(store: TokenStore) -> list[list[int]]:
    return [store.tokens[a:b].tolist() for a, b in zip(store.begins, store.ends, strict=True)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path / "tok", template=CHAT)


def expected(path: str, texts: list[str]) -> list[list[int]]:
    tokenizer = open_tokenizer(path)
    before, after = tokenizer.tokens_before_document, tokenizer.tokens_after_document
    return [[*before, *tokens.tolist(), *after] for tokens in tokenizer.encode_texts(texts)]


def write_source(kind: str, directory: Path) -> tuple[list[str], dict[str, object]]:
    """Writes 40 texts as `kind`; returns them and the settings that read them."""
    texts = [text(i) for i in range(40)]
    rows = [{"text": one, "other": i} for i, one in enumerate(texts)]
    directory.mkdir()
    if kind == "text":
        for i, one in enumerate(texts):
            (directory / f"{i:02}.txt").write_text(one)
    elif kind == "jsonl":
        write_json_lines(directory / "a.jsonl", rows[:15])
        write_json_lines(directory / "b.jsonl", rows[15:])
    else:
        return texts, write_rows(kind, directory, rows)
    return texts, {"source": kind, "paths": (f"{directory}/*",)}


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "datasets"])
def test_every_source_gives_the_tokens_of_its_texts(tmp_path: Path, tokenizer: str, kind: str):
    texts, settings = write_source(kind, tmp_path / "data")
    assert documents(store_of(tmp_path, tokenizer=tokenizer, **settings)) == expected(tokenizer, texts)


def test_several_processes_make_the_same_tokens(tmp_path: Path, tokenizer: str):
    paths = [Path(texts_file(tmp_path / f"{i}.jsonl", 20, first=100 * i)) for i in range(6)]
    parts = [
        part for path in paths for part in split_file("jsonl", SourceFile(str(path), path.stat().st_size))
    ]
    recipe = TokenizeSettings(
        DataSourceFields(), tokenizer, None, train_on="all", on_error="stop", dtype="uint16"
    )
    alone, together = (
        list(tokenize_tasks([[part] for part in parts], recipe, processes=processes)) for processes in (1, 2)
    )
    assert [one.tokens.tobytes() for one in together] == [one.tokens.tobytes() for one in alone]
    assert [one.ends.tolist() for one in together] == [one.ends.tolist() for one in alone]
    assert sum(len(one.ends) for one in alone) == 120


def test_an_error_of_a_worker_is_raised_in_the_parent(tmp_path: Path):
    line = json.dumps({"text": "x" * 1000}) + "\n"
    count = 9_000_000 // len(line)
    (tmp_path / "a.jsonl").write_text(line * count + "{\n")
    with pytest.raises(DataError, match=rf"a\.jsonl line {count + 1}"):
        store_of(tmp_path, source="jsonl", paths=(f"{tmp_path}/a.jsonl",), processes=2)
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_the_processes_that_make_tokens_and_the_quick_checks_need_no_torch():
    modules = "fullshard.data.tokenize, fullshard.jobs.checks.machine"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_tokens_are_made_again_only_if_an_input_changes(tmp_path: Path, tokenizer: str):
    path = texts_file(tmp_path / "a.jsonl", 9)
    settings = {"source": "jsonl", "paths": (path,), "tokenizer": tokenizer}
    before = store_of(tmp_path, **settings)
    made = Path(before.tokens.filename).stat().st_mtime_ns
    Path(path).rename(tmp_path / "b.jsonl")  # the same content
    again = store_of(tmp_path, **{**settings, "paths": (f"{tmp_path}/b.jsonl",)})
    assert (again.key, Path(again.tokens.filename).stat().st_mtime_ns) == (before.key, made)
    other = [store_of(tmp_path, **{**settings, "paths": (texts_file(tmp_path / "c.jsonl", 8),)})]
    other.append(store_of(tmp_path, **{**settings, "paths": (f"{tmp_path}/b.jsonl",), "eos_token": "a"}))
    config = Path(tokenizer, "tokenizer_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "t"}))
    other.append(store_of(tmp_path, **{**settings, "paths": (f"{tmp_path}/b.jsonl",)}))
    assert len({before.key, *(store.key for store in other)}) == 4


@pytest.mark.parametrize("save", [save_tokenizer, save_metaspace_tokenizer])
def test_a_text_has_the_same_tokens_wherever_it_is_cut(tmp_path: Path, save: Callable[[Path], str]):
    path, whole = save(tmp_path / "tok"), "the cat\n\nsat é\n\n\n  on a mat\n" * 60
    (tmp_path / "a.txt").write_text(whole)
    size = len(whole.encode())
    recipe = TokenizeSettings(DataSourceFields(), path, None, train_on="all", on_error="stop", dtype="uint16")
    (expected_tokens,) = expected(path, [whole])
    for step in (size, 97, 8):
        cuts = [*range(0, size, step), size]
        parts = [
            FilePart("text", f"{tmp_path}/a.txt", begin, end, end - begin, last=end == size)
            for begin, end in itertools.pairwise(cuts)
        ]
        (found,) = tokenize_tasks([parts], recipe, processes=1)
        assert found.tokens.tolist() == expected_tokens
        assert found.ends.tolist() == [len(expected_tokens)]


LINES = "the cat sat on a mat\n\nand saw é\n\n\n  the dog run far away from a cat\n"
ONE_LINE = "the cat sat on a mat  and saw é the dog run far away from a cat "


@pytest.mark.parametrize(
    ("save", "unit"),
    [
        (save_tokenizer, LINES),
        (save_metaspace_tokenizer, ONE_LINE),
        pytest.param(save_tokenizer, ONE_LINE, marks=pytest.mark.long),
        pytest.param(save_metaspace_tokenizer, LINES, marks=pytest.mark.long),
    ],
)
def test_a_long_row_has_the_tokens_that_it_has_as_a_whole(
    tmp_path: Path, save: Callable[[Path], str], unit: str
):
    path, whole = save(tmp_path / "tok"), "".join(f"{i % 7} {unit}" for i in range(1_200_000 // len(unit)))
    at = len(whole) // 2
    rows = [{"prompt": whole[:at], "completion": whole[at:]}, {"prompt": "the", "completion": " cat"}]
    settings = write_rows("jsonl", tmp_path, rows) | {"tokenizer": path, "records": "completion"}
    store = store_of(tmp_path, **settings, train_on="completion")
    assert documents(store) == expected(path, [whole, "the cat"])
    first = store.loss_mask.tolist().index(1)
    assert store.loss_mask[first : store.ends[0]].all()
    around = len(open_tokenizer(path).tokens_before_document)
    assert whole[:at].startswith(decoded(path, store.tokens[around:first]))
    assert not whole[:at].startswith(decoded(path, store.tokens[around : first + 1]))


def test_a_long_text_is_one_document(tmp_path: Path):
    whole = (text(3) + "\n") * (9_000_000 // len(text(3)))
    (tmp_path / "a.txt").write_text(whole)
    store = store_of(tmp_path, source="text", paths=(f"{tmp_path}/a.txt",), packing="best_fit")
    assert store.document_count == 1
    assert store.tokens.tobytes() == whole.encode() + b"\0"


@pytest.mark.parametrize("save", [save_tokenizer, save_metaspace_tokenizer, lambda _: None])
def test_a_completion_has_the_tokens_that_it_has_behind_its_prompt(
    tmp_path: Path, save: Callable[[Path], str | None]
):
    path = save(tmp_path / "tok")
    pairs = [("the cat", " sat"), ("the c", "at sat"), ("the cat\n\n", "\n sat"), ("", "the sat"), ("é", "é")]
    rows = [{"ask": prompt, "say": completion} for prompt, completion in pairs]
    settings = {**write_rows("jsonl", tmp_path, rows), "tokenizer": path, "records": "completion"}
    settings |= {"prompt_field": "ask", "completion_field": "say"}
    assert store_of(tmp_path, **settings).loss_mask is None
    store = store_of(tmp_path, **settings, train_on="completion")
    assert documents(store) == expected(path, ["".join(pair) for pair in pairs])
    around = 0 if path is None else len(open_tokenizer(path).tokens_before_document)
    for begin, end, (prompt, _) in zip(store.begins, store.ends, pairs, strict=True):
        tokens, trained = store.tokens[begin:end].tolist(), store.loss_mask[begin:end].tolist()
        first = trained.index(1)
        assert 0 not in trained[first:]
        counts = (first, first + 1)
        if path is None:
            before, with_first = (bytes(tokens[:count]).decode(errors="replace") for count in counts)
        else:
            before, with_first = (decoded(path, tokens[around:count]) for count in counts)
        assert prompt.startswith(before)
        assert not prompt.startswith(with_first)  # a token across the boundary is trained on


def test_tokens_of_long_rows_come_in_pieces(tmp_path: Path):
    path = write_json_lines(tmp_path / "a.jsonl", [{"input_ids": [7] * 100_000}] * 6)
    fields = DataSourceFields(records="tokens")
    recipe = TokenizeSettings(fields, None, None, train_on="all", on_error="stop", dtype="uint16")
    task = split_file("jsonl", SourceFile(path, Path(path).stat().st_size))
    found = tokenize_tasks([task], recipe, processes=1)
    assert [len(one.tokens) for one in found] == [300_000, 300_000, 0]


def test_conversations_are_rendered_by_template_and_only_answers_are_trained(tmp_path: Path, tokenizer: str):
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    path = write_json_lines(tmp_path / "a.jsonl", [{"messages": talk}] * 3)
    store = store_of(
        tmp_path, source="jsonl", paths=(path,), tokenizer=tokenizer, records="messages", train_on="assistant"
    )
    words = decoded(tokenizer, store.tokens[store.loss_mask == 1])
    assert words == "sat<|endoftext|>\n" * 3


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_prompts_of_both_kinds_are_left_out_in_a_mixture(tmp_path: Path, tokenizer: str, train_on: str):
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    chat = write_json_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    pair = write_json_lines(tmp_path / "b.jsonl", [{"prompt": "the cat", "completion": " ran"}])
    sources = [
        {"source": "jsonl", "paths": (chat,), "records": "messages"},
        {"source": "jsonl", "paths": (pair,), "records": "completion"},
    ]
    section = run_of(tmp_path / "cache", sources=sources, tokenizer=tokenizer, train_on=train_on).data
    root, said = make_cache_directory(section.cache), list[str]()
    for source in section.sources:
        (store,) = open_token_stores(source, section, root=root, alive=no_heartbeat)
        said.append(decoded(tokenizer, store.tokens[store.loss_mask == 1]))
    assert said == ["sat<|endoftext|>\n", " ran<|endoftext|>"]


def test_a_token_that_only_another_file_adds_is_refused(tmp_path: Path, tokenizer: str):
    config = Path(tokenizer, "tokenizer_config.json")
    added = {"400": {"content": "<new>", "special": True}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": added}))
    talk = [{"role": "user", "content": "the <new> cat"}, {"role": "assistant", "content": "sat"}]
    path = write_json_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    with pytest.raises(DataError, match=r"(?s)not in tokenizer.json.*save_pretrained"):
        store_of(tmp_path, source="jsonl", paths=(path,), tokenizer=tokenizer, records="messages")


BAD_LINES = ['{"text": "good"}', "{", '{"other": 1}', '{"text": 7}', '{"text": "too"}']


def test_corrupt_records_are_left_out_and_counted_if_asked(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n".join(BAD_LINES))
    store = store_of(tmp_path, source="jsonl", paths=(f"{tmp_path}/a.jsonl",), on_error="skip")
    assert [bytes(tokens) for tokens in documents(store)] == [b"good\0", b"too\0"]
    assert store.notes.skipped == 3
    assert [message.split(": ")[0].rpartition(" ")[2] for message in store.notes.skip_messages] == [
        "2",
        "3",
        "4",
    ]


ASKS = {"role": "user", "content": "the"}
BAD_FIELDS: dict[str, list[Any]] = {
    "text": ["\ud83d", None, 7, ["a"]],
    "prompt": ["\ud83d", None, 7],
    "messages": [[ASKS | {"content": "\ud83d"}], [], "{", [7], [{"role": "user"}], [ASKS | {"content": 7}]],
    "input_ids": [["a"], None, [-1], [10**6], {}],
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_every_row_that_cannot_be_tokenized_is_left_out_or_located(
    tmp_path: Path, tokenizer: str, field: str
):
    good: dict[str, Any] = {
        "text": "the",
        "prompt": "the",
        "completion": "cat",
        "messages": [ASKS],
        "input_ids": [1],
    }
    records = {"prompt": "completion", "input_ids": "tokens"}.get(field, field)
    rows = [good, *({**good, field: value} for value in BAD_FIELDS[field]), good]
    settings = {**write_rows("jsonl", tmp_path, rows), "tokenizer": tokenizer, "records": records}
    with pytest.raises(DataError, match=r"rows\.jsonl line [2-5]\."):
        store_of(tmp_path, **settings)
    store = store_of(tmp_path, **settings, on_error="skip")
    assert (store.document_count, store.notes.skipped) == (2, len(BAD_FIELDS[field]))


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_text_of_arrow_that_is_no_utf8_is_left_out_or_located(tmp_path: Path, kind: str):
    arrow = pytest.importorskip("pyarrow")
    texts = arrow.array([b"a", b"\xff", b"b"]).view(arrow.string())
    path, table = str(tmp_path / "rows"), arrow.table({"text": texts})
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        pytest.importorskip("datasets").Dataset(table).save_to_disk(path)
    with pytest.raises(DataError, match=r"rows\S* (row group 0 )?row 1\.(?s:.)*utf-8"):
        store_of(tmp_path, source=kind, paths=(path,))
    store = store_of(tmp_path, source=kind, paths=(path,), on_error="skip")
    assert (documents(store), store.notes.skipped) == ([[97, 0], [98, 0]], 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (BAD_LINES[1], r"a\.jsonl line 2(?s:.)*no JSON(?s:.)*on_error"),
        ('{"text": "a\\u0000b"}', r"a\.jsonl line 2(?s:.)*NUL"),
    ],
)
def test_a_corrupt_record_is_refused_with_file_and_line(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(FullshardError, match=message):
        store_of(tmp_path, source="jsonl", paths=(f"{tmp_path}/a.jsonl",))


def test_data_without_a_document_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n\n{\n")
    with pytest.raises(DataError, match=r"(?s)no document.*1 records left out.*line 3"):
        store_of(tmp_path, source="jsonl", paths=(f"{tmp_path}/a.jsonl",), on_error="skip")


def test_a_missing_split_is_refused_with_the_existing_ones(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "set")
    settings = {"source": "datasets", "paths": (f"{tmp_path}/set",)}
    assert store_of(tmp_path, **settings, split="test").document_count == 1
    with pytest.raises(DataError, match=r"(?s)no split 'dev'.*train, test"):
        store_of(tmp_path, **settings, split="dev")
    with pytest.raises(DataError, match="cannot be loaded"):
        store_of(tmp_path, source="datasets", paths=(str(tmp_path),))
    rows.save_to_disk(tmp_path / "rows")
    with pytest.raises(DataError, match="without splits"):
        store_of(tmp_path, source="datasets", paths=(f"{tmp_path}/rows",), split="train[:50%]")
