"""Text of others is shown without control characters by every exit. A reader may leave a stream."""

import io
import json
import logging
import os
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.files import MANIFEST
from fullshard.cli.main import main
from fullshard.observe.progress import ProgressPrinter, RunProgress
from fullshard.report.comparison import show_measurement
from fullshard.report.table import show_labelled_lines, show_table
from fullshard.system.terminal import (
    CLOSED_OUTPUT_EXIT_CODE,
    escape_control_characters,
    escape_to_single_line,
    open_stream_dropping_failed_writes,
)
from tests.checkpoint.states import saved
from tests.checkpoint.test_strangers import rewrite_manifest_text
from tests.spec.records.test_measurement import measurement

EVIL = "a\x1b[2J\x07\x9b\u202eb\rc"


def assert_shown(text: str) -> None:
    assert r"a\u001b[2J\u0007\u009b\u202eb\u000dc" in text
    assert not re.search("[\x1b\x07\x9b\u202e\r]", text)


@given(st.text())
def test_printable_text_can_be_printed_and_json_reads_it_back(text: str) -> None:
    escape_control_characters(text).encode()
    assert not any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in escape_to_single_line(text))
    encoded = escape_control_characters(json.dumps(text, ensure_ascii=False))
    assert json.loads(encoded) == text
    assert escape_control_characters(encoded) == encoded


def test_names_in_a_checkpoint_are_escaped_by_every_command(tmp_path: Path, capsys) -> None:
    root = tmp_path / EVIL
    one, other = saved(root / "checkpoints", 1), saved(root / "checkpoints", 2)
    name = json.dumps(f"model.{EVIL}")
    rewrite_manifest_text(one, (one / MANIFEST).read_text().replace('"model.uneven"', name))
    (other / EVIL).touch()
    for arguments in (["verify", str(root)], ["list", str(root / "absent")]):
        main(["ckpt", *arguments])
        assert_shown("".join(capsys.readouterr()))


def test_names_of_files_are_escaped_by_the_commands_that_read_or_write_them(tmp_path: Path, capsys) -> None:
    (tmp_path / f"{EVIL}.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    saved(tmp_path / "checkpoints", 1)
    for arguments in (
        ["convert", f"{tmp_path}/{EVIL}.json"],
        ["ckpt", "export", str(tmp_path), f"{tmp_path}/{EVIL}.safetensors"],
        ["init", f"{tmp_path}/{EVIL}.toml"],
    ):
        main(arguments)
        assert_shown("".join(capsys.readouterr()))


def test_logs_progress_and_tables_are_escaped(tmp_path: Path, capsys, caplog) -> None:
    main(["ckpt", "list", str(tmp_path)])
    logging.getLogger("fullshard").warning("passing over %s", EVIL)
    assert_shown(caplog.messages[-1])
    out = io.StringIO()
    ProgressPrinter(RunProgress(steps=1, world_size=1), every=1, file=out).print_line(EVIL)
    assert_shown(out.getvalue())
    show_labelled_lines([(EVIL, "")])
    assert_shown(capsys.readouterr().out)
    show_table([""], [[EVIL]])
    assert_shown(capsys.readouterr().out)
    show_measurement(measurement().model_copy(update={"directory": EVIL}))
    assert_shown(capsys.readouterr().out)


@pytest.fixture
def abandoned() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_messages_to_a_reader_that_has_left_are_dropped(abandoned: int) -> None:
    stream = open_stream_dropping_failed_writes(abandoned, like=None, raises_first_failure=False)
    print("a message", file=stream, flush=True)
    os.close(abandoned)
    print("another, and the descriptor is closed", file=stream, flush=True)


def test_a_result_without_a_reader_ends_the_process_once(abandoned: int) -> None:
    stream = open_stream_dropping_failed_writes(abandoned, like=None, raises_first_failure=True)
    with pytest.raises(SystemExit) as ended:
        print("a result", file=stream, flush=True)
    assert ended.value.code == CLOSED_OUTPUT_EXIT_CODE
    stream.flush()  # as Python does at its end: nothing more is raised


def test_a_result_that_cannot_be_written_to_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = open_stream_dropping_failed_writes(full.fileno(), like=None, raises_first_failure=True)
        with pytest.raises(OSError, match="No space"):
            print("a result", file=stream, flush=True)


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as like:
        stream = open_stream_dropping_failed_writes(like.fileno(), like=like, raises_first_failure=True)
        print("grün ␀", file=stream, flush=True)
    assert (tmp_path / "out").read_text() == "gr\\xfcn \\u2400\n"
